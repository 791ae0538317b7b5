/* Read the items of a batch into memory, hash them and scale them, each while it is in the processor's cache.
 *
 * One call is one release of Python's lock for a batch. Built by `make native`; without it Python does the same.
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

typedef uint64_t (*hash_function)(const void *, size_t);
enum { NONE, FLOAT16, BFLOAT16, FLOAT32 };
#define MULTIPLY(x) __builtin_fmaf((x), factor, term)

FAST static void scale_float16(uint16_t *z, int64_t count, float factor, float term)
{
    int64_t at = 0;
#if defined(__x86_64__)
    const __m256 by = _mm256_set1_ps(factor), plus = _mm256_set1_ps(term);
    for (; at + 8 <= count; at += 8) {
        __m256 x = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(z + at)));
        _mm_storeu_si128((__m128i *)(z + at), _mm256_cvtps_ph(_mm256_fmadd_ps(x, by, plus), 0));
    }
    for (; at < count; at++)
        z[at] = _cvtss_sh(MULTIPLY(_cvtsh_ss(z[at])), 0);
#else
    _Float16 *x = (_Float16 *)z;
    for (; at < count; at++)
        x[at] = (_Float16)MULTIPLY((float)x[at]);
#endif
}

FAST static void scale_bfloat16(uint16_t *z, int64_t count, float factor, float term)
{
    for (int64_t at = 0; at < count; at++) {
        uint32_t bits = (uint32_t)z[at] << 16;
        float x;
        memcpy(&x, &bits, 4);
        x = MULTIPLY(x);
        memcpy(&bits, &x, 4);
        uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        z[at] = (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded; /* not a number stays so */
    }
}

FAST static void scale_float32(float *z, int64_t count, float factor, float term)
{
    for (int64_t at = 0; at < count; at++)
        z[at] = MULTIPLY(z[at]);
}

static void scale(char *item, int64_t bytes, int kind, const float *factor, const float *term, int64_t channels)
{
    const int64_t size = kind == FLOAT32 ? 4 : 2, count = bytes / size / channels;
    for (int64_t channel = 0; channel < channels; channel++, item += count * size)
        if (kind == FLOAT16)
            scale_float16((uint16_t *)item, count, factor[channel], term[channel]);
        else if (kind == BFLOAT16)
            scale_bfloat16((uint16_t *)item, count, factor[channel], term[channel]);
        else
            scale_float32((float *)item, count, factor[channel], term[channel]);
}

/* 1: this processor can scale. */
int can_scale(void)
{
    return READY != 0;
}

/* Read `count` items; the rows of `places` are descriptor, first byte, bytes and address of each.
 *
 * hash, hashes: hash of the bytes as they are stored, or null.
 * kind: type of the values if they are scaled; factor, term: (channels,); items are (channels, ...).
 * Returns how many came whole: `count`, or the number of the item that did not.
 */
int64_t gather(int64_t count, const int64_t *places, hash_function hash, uint64_t *hashes, int kind,
               const float *factor, const float *term, int64_t channels)
{
    const int64_t *file = places, *first = file + count, *bytes = first + count, *address = bytes + count;
    for (int64_t item = 0; item < count; item++) {
        char *out = (char *)(intptr_t)address[item];
        for (int64_t done = 0; done < bytes[item];) {
            ssize_t found = pread((int)file[item], out + done, bytes[item] - done, first[item] + done);
            if (found > 0)
                done += found;
            else if (found == 0 || errno != EINTR)
                return item;
        }
        if (hash)
            hashes[item] = hash(out, bytes[item]);
        if (kind != NONE)
            scale(out, bytes[item], kind, factor, term, channels);
    }
    return count;
}
