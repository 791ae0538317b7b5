/* Read the items of a batch into memory, hash them and scale them, each while it is in the processor's cache.
 *
 * A thread of this library reads ahead without Python's lock, and the thread that wants a batch helps. Built by
 * `make native`; without it Python does the same.
 * Values are computed in float32 with one fused multiply-add and rounded once, to the nearest, ties to even.
 */
#include <errno.h>
#include <pthread.h>
#include <signal.h>
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

/* Items to read; the caller's memory until `finish` has returned. */
struct job {
    int64_t count;
    const int64_t *places; /* descriptor, first byte, bytes and place in the memory of each item, in rows */
    int64_t stride;        /* from row to row */
    char *out;             /* the memory */
    hash_function hash;
    uint64_t *hashes; /* of the bytes as they are stored; or null */
    int64_t kind;     /* type of the values if they are scaled */
    const float *factor, *term; /* (channels,); items are (channels, ...) */
    int64_t channels;
    int64_t next, running, failed; /* under the lock: next item, items under way, items that did not come whole */
    struct job *later;
};

static int read_item(const struct job *job, int64_t item)
{
    const int64_t *file = job->places + item, stride = job->stride;
    const int64_t first = file[stride], bytes = file[2 * stride];
    char *out = job->out + file[3 * stride];
    for (int64_t done = 0; done < bytes;) {
        ssize_t found = pread((int)*file, out + done, bytes - done, first + done);
        if (found > 0)
            done += found;
        else if (found == 0 || errno != EINTR)
            return 1;
    }
    if (job->hash)
        job->hashes[item] = job->hash(out, bytes);
    if (job->kind != NONE)
        scale(out, bytes, job->kind, job->factor, job->term, job->channels);
    return 0;
}

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t more = PTHREAD_COND_INITIALIZER, ended = PTHREAD_COND_INITIALIZER;
static struct job *first_job;
static int started;

/* One item of a job, if one is left; called and left with the lock held. */
static int step(struct job *job)
{
    if (job->next >= job->count)
        return 0;
    int64_t item = job->next++;
    job->running++;
    pthread_mutex_unlock(&lock);
    int failed = read_item(job, item);
    pthread_mutex_lock(&lock);
    job->failed += failed;
    if (--job->running == 0 && job->next >= job->count)
        pthread_cond_broadcast(&ended);
    return 1;
}

static void *work(void *unused)
{
    pthread_mutex_lock(&lock);
    for (;;) {
        while (first_job && first_job->next >= first_job->count)
            first_job = first_job->later;
        if (first_job)
            step(first_job);
        else
            pthread_cond_wait(&more, &lock);
    }
    return unused;
}

static void before_fork(void) { pthread_mutex_lock(&lock); }
static void after_fork(void) { pthread_mutex_unlock(&lock); }
static void in_child(void) /* no thread is here */
{
    lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    more = ended = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
    first_job = NULL;
    started = 0;
}
__attribute__((constructor)) static void watch_forks(void) { pthread_atfork(before_fork, after_fork, in_child); }

/* Have a thread begin with a job; without one `finish` does all of it. */
void begin(struct job *job)
{
    pthread_mutex_lock(&lock);
    pthread_t thread;
    sigset_t all, kept;
    if (!started) {
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &kept); /* signals are for Python's threads */
        started = pthread_create(&thread, NULL, work, NULL) == 0 && pthread_detach(thread) == 0;
        pthread_sigmask(SIG_SETMASK, &kept, NULL);
    }
    struct job **last = &first_job;
    while (*last)
        last = &(*last)->later;
    *last = job;
    pthread_cond_signal(&more);
    pthread_mutex_unlock(&lock);
}

/* Wait for a job, and help; what nobody has begun is left out if it is not wanted. Returns items that failed. */
int64_t finish(struct job *job, int wanted)
{
    pthread_mutex_lock(&lock);
    while (wanted && step(job))
        ;
    job->next = job->count;
    for (struct job **one = &first_job; *one; one = &(*one)->later)
        if (*one == job) {
            *one = job->later;
            break;
        }
    while (job->running)
        pthread_cond_wait(&ended, &lock);
    pthread_mutex_unlock(&lock);
    return job->failed;
}

/* Leave out everything that is not begun, and wait for the rest: before the interpreter frees memory. */
void stop(void)
{
    pthread_mutex_lock(&lock);
    while (first_job) {
        struct job *job = first_job;
        job->failed += job->count - job->next;
        job->next = job->count;
        while (job->running)
            pthread_cond_wait(&ended, &lock);
        if (first_job == job)
            first_job = job->later;
    }
    pthread_mutex_unlock(&lock);
}
