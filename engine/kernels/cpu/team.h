// The threads that share a kernel's work: those that came here together, from within a parallel region, or else, where the
// work is worth waking them, a team of the kernel's own.
#pragma once
#include <omp.h>

// Calls `f` once a thread. Loops in it are shared by `omp for`, which ends when all are done.
template <class F> void in_team(bool is_big, F f) {
  if (omp_in_parallel()) return f();
#pragma omp parallel if (is_big)
  f();
}
