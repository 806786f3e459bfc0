"""C source that counts, exactly, how long threads hold Python's GIL: put before libpython when a process starts.

Extensions let the GIL go and take it again through PyEval_SaveThread and PyEval_RestoreThread. Between the second and
the first a thread's processor time counts as held. Other threads than the main one are summed; of the main thread the
wall time is summed that it waits in PyEval_RestoreThread. Waits inside libpython (locks, time.sleep) may go by
uncounted; they use no processor time, but hide some of what the main thread waits.
"""

from __future__ import annotations

GIL_SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static _Atomic long long held_ns, main_waited_ns;
static __thread long long taken_at_ns;  /* on the thread's own clock; 0: since it began */
static void *(*save)(void);
static void (*restore)(void *);

static long long now(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static int is_main(void) { return syscall(SYS_gettid) == getpid(); }

__attribute__((constructor)) static void find(void) {
    save = (void *(*)(void))dlsym(RTLD_NEXT, "PyEval_SaveThread");
    restore = (void (*)(void *))dlsym(RTLD_NEXT, "PyEval_RestoreThread");
}

void *PyEval_SaveThread(void) {
    if (!is_main()) held_ns += now(CLOCK_THREAD_CPUTIME_ID) - taken_at_ns;
    return save();
}

void PyEval_RestoreThread(void *state) {
    long long begin = now(CLOCK_MONOTONIC);
    restore(state);
    if (is_main())
        main_waited_ns += now(CLOCK_MONOTONIC) - begin;
    else
        taken_at_ns = now(CLOCK_THREAD_CPUTIME_ID);
}

long long gil_held_ns(void) { return held_ns; }
long long gil_main_waited_ns(void) { return main_waited_ns; }
"""
