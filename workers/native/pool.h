// The threads of a step. A step is a list of phases, a phase a number of tasks that any thread may claim.
//
// A phase is over when its tasks are done, not when every thread has come by: a thread that the system has put aside
// holds nobody up unless it is inside a task. Counters carry the step's generation, so a late thread of an old step can
// neither claim nor count in a new one.
#pragma once
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#define MAX_PHASES 4096
#define CLOSED 0x7fffffffu  // more tasks than any phase has
#define SPINS_BEFORE_YIELD 1500
#define SPINS_BEFORE_SLEEP 3000

typedef struct {
    _Alignas(64) _Atomic uint64_t claimed;  // generation << 32 | tasks given out
    _Alignas(64) _Atomic uint64_t done;     // generation << 32 | tasks finished
} Phase;

struct Pool;
typedef void (*StepFunction)(struct Pool *pool, uint32_t generation, int thread);

typedef struct Pool {
    Phase phases[MAX_PHASES];
    _Alignas(64) _Atomic uint32_t generation;  // of the step that runs or ran last; 0 = none yet
    _Atomic int sleepers;
    _Atomic int closing;
    int num_threads;
    pthread_t threads[256];
    StepFunction function;
    void *step;
} Pool;

typedef struct {
    Pool *pool;
    int thread;
} PoolThread;

static inline void cpu_pause(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void *pool_thread(void *argument) {
    PoolThread self = *(PoolThread *)argument;
    free(argument);
    Pool *pool = self.pool;
    uint32_t seen = 0;
    for (;;) {
        uint32_t now;
        int spins = 0;
        while ((now = atomic_load_explicit(&pool->generation, memory_order_acquire)) == seen) {
            cpu_pause();
            if (++spins < SPINS_BEFORE_SLEEP) continue;
            atomic_fetch_add(&pool->sleepers, 1);
            syscall(SYS_futex, &pool->generation, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
            atomic_fetch_sub(&pool->sleepers, 1);
        }
        if (atomic_load(&pool->closing)) return NULL;
        seen = now;
        pool->function(pool, now, self.thread);
    }
}

static Pool *pool_open(int num_threads, StepFunction function) {
    Pool *pool = NULL;
    if (posix_memalign((void **)&pool, 64, sizeof(Pool))) return NULL;
    memset(pool, 0, sizeof(Pool));
    pool->num_threads = num_threads;
    pool->function = function;
    for (int i = 1; i < num_threads; i++) {
        PoolThread *self = malloc(sizeof(PoolThread));
        *self = (PoolThread){pool, i};
        pthread_create(&pool->threads[i], NULL, pool_thread, self);
    }
    return pool;
}

static void pool_wake(Pool *pool, uint32_t generation) {
    atomic_store(&pool->generation, generation);
    if (atomic_load(&pool->sleepers))
        syscall(SYS_futex, &pool->generation, FUTEX_WAKE_PRIVATE, pool->num_threads, NULL, NULL, 0);
}

static void pool_close(Pool *pool) {
    atomic_store(&pool->closing, 1);
    pool_wake(pool, atomic_load(&pool->generation) + 1);
    for (int i = 1; i < pool->num_threads; i++) pthread_join(pool->threads[i], NULL);
    free(pool);
}

// Runs the step on all threads; returns when the last phase is done.
static void pool_run(Pool *pool, void *step, int num_phases) {
    uint32_t generation = atomic_load(&pool->generation) + 1;
    if (generation == 0) generation = 1;
    pool->step = step;
    for (int i = 0; i < num_phases; i++) {
        atomic_store_explicit(&pool->phases[i].done, (uint64_t)generation << 32, memory_order_relaxed);
        atomic_store_explicit(&pool->phases[i].claimed, (uint64_t)generation << 32, memory_order_release);
    }
    pool_wake(pool, generation);
    pool->function(pool, generation, 0);
    // A late thread reads the number of tasks from the batch, and the next batch may have more: leave it none to claim.
    for (int i = 0; i < num_phases; i++) {
        atomic_store_explicit(&pool->phases[i].claimed, ((uint64_t)generation << 32) | CLOSED, memory_order_release);
        atomic_store_explicit(&pool->phases[i].done, ((uint64_t)generation << 32) | CLOSED, memory_order_release);
    }
}

// The next task of the phase, or -1 when there is none left.
static inline int phase_claim(Phase *phase, uint32_t generation, int num_tasks) {
    uint64_t now = atomic_load_explicit(&phase->claimed, memory_order_acquire);
    for (;;) {
        if (now >> 32 != generation || (int)(uint32_t)now >= num_tasks) return -1;
        if (atomic_compare_exchange_weak_explicit(&phase->claimed, &now, now + 1, memory_order_acq_rel,
                                                  memory_order_acquire))
            return (int)(uint32_t)now;
    }
}

static inline void phase_finish(Phase *phase) { atomic_fetch_add_explicit(&phase->done, 1, memory_order_acq_rel); }

static inline void phase_wait(Phase *phase, uint32_t generation, int num_tasks) {
    uint64_t wanted = ((uint64_t)generation << 32) + (uint64_t)num_tasks;
    for (int spins = 0;; spins++) {
        uint64_t now = atomic_load_explicit(&phase->done, memory_order_acquire);
        if (now >= wanted) return;  // also when a later step has begun
        cpu_pause();
        if (spins > SPINS_BEFORE_YIELD) sched_yield();
    }
}
