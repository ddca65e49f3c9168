// Work shared out over the threads of the OpenMP runtime that torch has loaded, so that there is one pool of them.
// The runtime is handed over by address (build.py); without one, a single thread does all.

#pragma once
#include <cstdint>

namespace {

using i64 = int64_t;
typedef void (*Parallel)(void (*)(void*), void*, unsigned, unsigned);
typedef int (*Count)();
Parallel parallel = nullptr;
Count thread_number = nullptr, thread_count = nullptr;

template <class Job>
struct Shared {
  const Job* job;
  void (*unit)(const Job&, i64);
  i64 units;
};
template <class Job>
void share(void* data) {
  const auto& s = *(Shared<Job>*)data;
  const i64 number = thread_number(), count = thread_count();
  for (i64 unit = s.units * number / count; unit < s.units * (number + 1) / count; unit++) s.unit(*s.job, unit);
}
// `unit(job, i)` for i below `units`. `elements`: how much work it is; a little is not worth waking threads for.
template <class Job>
void run(const Job& job, void (*unit)(const Job&, i64), i64 units, i64 elements, int threads) {
  if (parallel && threads > 1 && units > 1 && elements > 32768) {
    Shared<Job> shared{&job, unit, units};
    parallel(share<Job>, &shared, (unsigned)(units < threads ? units : threads), 0);
    return;
  }
  for (i64 i = 0; i < units; i++) unit(job, i);
}

}  // namespace

// Addresses of GOMP_parallel, omp_get_thread_num and omp_get_num_threads.
extern "C" void tw_use_openmp(Parallel p, Count number, Count count) {
  parallel = p;
  thread_number = number;
  thread_count = count;
}
