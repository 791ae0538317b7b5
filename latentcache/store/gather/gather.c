/* Read the items of a batch by position, and scale each piece while it is in the processor's cache.
 *
 * Called once for a batch, without Python's lock. Built by `make native`; without it Python does the same.
 * Values are computed in float32 with one fused multiply-add and rounded once, to the nearest, ties to even.
 */
#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define FAST __attribute__((target("avx2,f16c,fma")))
#define READY (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
#else
#define FAST
#define READY 1
#endif

/* A multiple of every width; the second level of a processor's cache has at least twice as much. */
enum { PIECE_BYTES = 128 << 10 };
enum { NONE, FLOAT16, BFLOAT16, FLOAT32 };
#define MULTIPLY(x) __builtin_fmaf((x), factor, term)

FAST static void scale_float16(uint16_t *values, int64_t count, float factor, float term)
{
    int64_t at = 0;
#if defined(__x86_64__)
    const __m256 by = _mm256_set1_ps(factor), plus = _mm256_set1_ps(term);
    for (; at + 8 <= count; at += 8) {
        __m256 x = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(values + at)));
        _mm_storeu_si128((__m128i *)(values + at), _mm256_cvtps_ph(_mm256_fmadd_ps(x, by, plus), 0));
    }
    for (; at < count; at++)
        values[at] = _cvtss_sh(MULTIPLY(_cvtsh_ss(values[at])), 0);
#else
    for (; at < count; at++)
        ((_Float16 *)values)[at] = (_Float16)MULTIPLY((float)((const _Float16 *)values)[at]);
#endif
}

FAST static void scale_bfloat16(uint16_t *values, int64_t count, float factor, float term)
{
    for (int64_t at = 0; at < count; at++) {
        uint32_t bits = (uint32_t)values[at] << 16;
        float x;
        memcpy(&x, &bits, 4);
        x = MULTIPLY(x);
        memcpy(&bits, &x, 4);
        uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        values[at] = (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded; /* not a number stays so */
    }
}

FAST static void scale_float32(float *values, int64_t count, float factor, float term)
{
    for (int64_t at = 0; at < count; at++)
        values[at] = MULTIPLY(values[at]);
}

struct scaling {
    int64_t kind;     /* type of the values; NONE: they stay as they are */
    int64_t channels; /* items are (channels, ...) */
    const float *factor, *term; /* (channels,) */
};

/* Scale part of an item in place; `done` bytes of the item come before it. */
static void scale(const struct scaling *scaling, char *values, int64_t done, int64_t bytes, int64_t item_bytes)
{
    const int64_t channel_bytes = item_bytes / scaling->channels;
    while (bytes > 0) {
        const int64_t channel = done / channel_bytes, left = (channel + 1) * channel_bytes - done;
        const int64_t part = left < bytes ? left : bytes;
        const float factor = scaling->factor[channel], term = scaling->term[channel];
        if (scaling->kind == FLOAT16)
            scale_float16((uint16_t *)values, part / 2, factor, term);
        else if (scaling->kind == BFLOAT16)
            scale_bfloat16((uint16_t *)values, part / 2, factor, term);
        else
            scale_float32((float *)values, part / 4, factor, term);
        values += part;
        done += part;
        bytes -= part;
    }
}

static int read_whole(int file, char *out, int64_t bytes, int64_t first)
{
    for (int64_t done = 0; done < bytes;) {
        const ssize_t count = pread(file, out + done, bytes - done, first + done);
        if (count > 0)
            done += count;
        else if (count == 0 || errno != EINTR)
            return 0;
    }
    return 1;
}

/* 1: this processor can scale. */
int can_scale(void)
{
    return READY != 0;
}

/* Read items, unless they are in memory already, and scale them. `items` has four rows: descriptor, first byte in
 * the file, bytes, first byte in `out`. Returns the number of items before the first that did not come whole.
 */
int64_t gather(int64_t count, const int64_t *items, char *out, int is_there, int64_t kind, int64_t channels,
               const float *factor, const float *term)
{
    const struct scaling scaling = {kind, channels, factor, term};
    const int64_t *file = items, *first = file + count, *bytes = first + count, *at = bytes + count;
    for (int64_t item = 0; item < count; item++)
        for (int64_t done = 0; done < bytes[item]; done += PIECE_BYTES) {
            const int64_t left = bytes[item] - done, size = left < PIECE_BYTES ? left : PIECE_BYTES;
            char *piece = out + at[item] + done;
            if (!is_there && !read_whole((int)file[item], piece, size, first[item] + done))
                return item;
            if (kind != NONE)
                scale(&scaling, piece, done, size, bytes[item]);
        }
    return count;
}
