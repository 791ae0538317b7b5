/* Copy the items of a batch into memory, hash them and scale them, each while it is in the processor's cache.
 *
 * Items come straight from a mapped file, or are read where there is no map. A page that a file has lost (it was cut
 * short, or its disk failed) is a signal, SIGBUS: here it fails the item, and Python reads it again to say why.
 * A thread of this library reads ahead without Python's lock, and the thread that wants a batch helps. Built by
 * `make native`; without it Python does the same.
 * Values are computed in float32 with one fused multiply-add and rounded once, to the nearest, ties to even.
 */
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
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
enum { NONE, FLOAT16, BFLOAT16, FLOAT32, SPINS = 2000 };
#define MULTIPLY(x) __builtin_fmaf((x), factor, term)

FAST static void scale_float16(uint16_t *out, const uint16_t *z, int64_t count, float factor, float term)
{
    int64_t at = 0;
#if defined(__x86_64__)
    const __m256 by = _mm256_set1_ps(factor), plus = _mm256_set1_ps(term);
    for (; at + 8 <= count; at += 8) {
        __m256 x = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(z + at)));
        _mm_storeu_si128((__m128i *)(out + at), _mm256_cvtps_ph(_mm256_fmadd_ps(x, by, plus), 0));
    }
    for (; at < count; at++)
        out[at] = _cvtss_sh(MULTIPLY(_cvtsh_ss(z[at])), 0);
#else
    for (; at < count; at++)
        ((_Float16 *)out)[at] = (_Float16)MULTIPLY((float)((const _Float16 *)z)[at]);
#endif
}

FAST static void scale_bfloat16(uint16_t *out, const uint16_t *z, int64_t count, float factor, float term)
{
    for (int64_t at = 0; at < count; at++) {
        uint32_t bits = (uint32_t)z[at] << 16;
        float x;
        memcpy(&x, &bits, 4);
        x = MULTIPLY(x);
        memcpy(&bits, &x, 4);
        uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        out[at] = (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded; /* not a number stays so */
    }
}

FAST static void scale_float32(float *out, const float *z, int64_t count, float factor, float term)
{
    for (int64_t at = 0; at < count; at++)
        out[at] = MULTIPLY(z[at]);
}

/* Copy past the cache: a large batch does not stay there, and what lies at its place need not be read first. */
FAST static void copy_past(char *out, const char *from, int64_t bytes)
{
#if defined(__x86_64__)
    if (((uintptr_t)out & 15) == 0)
        for (; bytes >= 16; bytes -= 16, out += 16, from += 16)
            _mm_stream_si128((__m128i *)out, _mm_loadu_si128((const __m128i *)from));
#endif
    memcpy(out, from, bytes);
}

/* Items to copy; the caller's memory until `finish` has returned. */
struct job {
    int64_t count;
    const int64_t *places; /* of each item, in rows: descriptor, first byte, bytes, place in the memory, address or 0 */
    int64_t stride;        /* from row to row */
    char *out;             /* the memory */
    int64_t past;          /* 1: copy past the cache what is not scaled */
    hash_function hash;
    uint64_t *hashes; /* of the bytes as they are stored; or null */
    int64_t kind;     /* type of the values if they are scaled */
    const float *factor, *term; /* (channels,); items are (channels, ...) */
    int64_t channels;
    int64_t next, failed; /* next item; items that did not come whole */
    int64_t helped;       /* 1: the thread is at it */
    struct job *later;
};

/* Scale an item into its place, or where it is. */
static void scale(const struct job *job, char *out, const char *from, int64_t bytes)
{
    const int64_t part = bytes / job->channels;
    for (int64_t channel = 0; channel < job->channels; channel++, out += part, from += part) {
        const float factor = job->factor[channel], term = job->term[channel];
        if (job->kind == FLOAT16)
            scale_float16((uint16_t *)out, (const uint16_t *)from, part / 2, factor, term);
        else if (job->kind == BFLOAT16)
            scale_bfloat16((uint16_t *)out, (const uint16_t *)from, part / 2, factor, term);
        else
            scale_float32((float *)out, (const float *)from, part / 4, factor, term);
    }
}

/* 1: this processor can scale. */
int can_scale(void)
{
    return READY != 0;
}

/* Where a thread goes on if a mapped page is not there; null: it is not copying. */
static __thread sigjmp_buf *escape __attribute__((tls_model("initial-exec")));
static struct sigaction others;

static void on_bus(int number)
{
    static struct sigaction none;
    if (escape)
        siglongjmp(*escape, 1);
    sigaction(number, &others, NULL); /* not ours: the faulting instruction runs again, and that handler is called */
    others = none;
}

static void watch_bus(void)
{
    struct sigaction ours, now;
    if (sigaction(SIGBUS, NULL, &now) == 0 && now.sa_handler != on_bus) {
        memset(&ours, 0, sizeof ours);
        ours.sa_handler = on_bus;
        ours.sa_flags = SA_NODEFER;
        others = now;
        sigaction(SIGBUS, &ours, NULL);
    }
}

static int read_whole(int file, char *out, int64_t bytes, int64_t first)
{
    for (int64_t done = 0; done < bytes;) {
        ssize_t found = pread(file, out + done, bytes - done, first + done);
        if (found > 0)
            done += found;
        else if (found == 0 || errno != EINTR)
            return 0;
    }
    return 1;
}

static void copy(const struct job *job, int64_t item, char *out, const char *from, int64_t bytes)
{
    if (job->hash)
        job->hashes[item] = job->hash(from, bytes);
    if (job->kind != NONE)
        scale(job, out, from, bytes);
    else if (out != from)
        (job->past ? copy_past(out, from, bytes) : (void)memcpy(out, from, bytes));
}

static int failed_item(const struct job *job, int64_t item)
{
    const int64_t *row = job->places + item, stride = job->stride;
    const int64_t first = row[stride], bytes = row[2 * stride], mapped = row[4 * stride];
    char *out = job->out + row[3 * stride];
    if (!mapped) {
        if (!read_whole((int)*row, out, bytes, first))
            return 1;
        copy(job, item, out, out, bytes);
        return 0;
    }
    sigjmp_buf back;
    if (sigsetjmp(back, 0)) {
        escape = NULL;
        return 1;
    }
    escape = &back;
    copy(job, item, out, (const char *)mapped, bytes);
    escape = NULL;
#if defined(__x86_64__)
    _mm_sfence(); /* what went past the cache is there before the item counts as done */
#endif
    return 0;
}

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t more = PTHREAD_COND_INITIALIZER, left = PTHREAD_COND_INITIALIZER;
static struct job *first_job; /* those that wait for the thread; under the lock, as the next two */
static int started, helping;
static int64_t posted; /* jobs so far */

/* Wait a little for a number to change from `old`: to be woken takes longer than most waits last. */
static void spin(const int64_t *number, int64_t old)
{
    for (int turn = 0; turn < SPINS && __atomic_load_n(number, __ATOMIC_ACQUIRE) == old; turn++)
#if defined(__x86_64__)
        _mm_pause();
#else
        ;
#endif
}

/* Copy items of a job until none is left. */
static void work(struct job *job)
{
    int64_t item;
    while ((item = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED)) < job->count)
        if (failed_item(job, item))
            __atomic_fetch_add(&job->failed, 1, __ATOMIC_RELAXED);
}

static void *serve(void *unused)
{
    pthread_mutex_lock(&lock);
    for (;;) {
        struct job *job = first_job;
        if (job) {
            first_job = job->later;
            job->helped = helping = 1;
            pthread_mutex_unlock(&lock);
            work(job);
            pthread_mutex_lock(&lock);
            helping = 0;
            __atomic_store_n(&job->helped, 0, __ATOMIC_RELEASE);
            pthread_cond_broadcast(&left);
            continue;
        }
        int64_t seen = posted;
        pthread_mutex_unlock(&lock);
        spin(&posted, seen);
        pthread_mutex_lock(&lock);
        if (!first_job)
            pthread_cond_wait(&more, &lock);
    }
    return unused;
}

static void before_fork(void) { pthread_mutex_lock(&lock); }
static void after_fork(void) { pthread_mutex_unlock(&lock); }
static void in_child(void) /* no thread is here */
{
    lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    more = left = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
    first_job = NULL;
    started = helping = 0;
}
__attribute__((constructor)) static void watch_forks(void) { pthread_atfork(before_fork, after_fork, in_child); }

/* Have a thread begin with a job; without one `finish` does all of it. */
void begin(struct job *job)
{
    watch_bus();
    pthread_mutex_lock(&lock);
    pthread_t thread;
    sigset_t all, kept;
    if (!started) {
        sigfillset(&all);
        sigdelset(&all, SIGBUS);
        pthread_sigmask(SIG_SETMASK, &all, &kept); /* signals are for Python's threads */
        started = pthread_create(&thread, NULL, serve, NULL) == 0 && pthread_detach(thread) == 0;
        pthread_sigmask(SIG_SETMASK, &kept, NULL);
    }
    struct job **last = &first_job;
    while (*last)
        last = &(*last)->later;
    *last = job;
    __atomic_store_n(&posted, posted + 1, __ATOMIC_RELEASE);
    pthread_cond_signal(&more);
    pthread_mutex_unlock(&lock);
}

/* Have nobody begin with a job, and wait for who has. */
static void leave(struct job *job)
{
    spin(&job->helped, 1);
    pthread_mutex_lock(&lock);
    for (struct job **one = &first_job; *one; one = &(*one)->later)
        if (*one == job) {
            *one = job->later;
            break;
        }
    while (job->helped)
        pthread_cond_wait(&left, &lock);
    pthread_mutex_unlock(&lock);
}

/* Wait for a job, and help; what nobody has begun is left out if it is not wanted. Returns items that failed. */
int64_t finish(struct job *job, int wanted)
{
    watch_bus();
    if (wanted)
        work(job);
    else
        __atomic_store_n(&job->next, job->count, __ATOMIC_RELAXED);
    leave(job);
    return job->failed;
}

/* Begin with nothing more, and wait for what was begun: before the interpreter frees memory. */
void stop(void)
{
    pthread_mutex_lock(&lock);
    first_job = NULL;
    while (helping)
        pthread_cond_wait(&left, &lock);
    pthread_mutex_unlock(&lock);
}
