// Loops over the threads of a decode step on a CPU.
//
// Most loops of a decode step are over the rows of a weight or over the heads
// of attention. Such a loop lasts a few microseconds, and waits for memory most
// of this time. Between two loops, the thread that runs the step does small
// work, and all other threads wait. WithThreadTeam keeps LibTorch's threads in
// one parallel region (a team) for all layers. So a loop starts faster, and a
// thread that waits can prefetch its rows of the next weight.
#ifndef WEFT_SRC_OPS_THREAD_TEAM_H_
#define WEFT_SRC_OPS_THREAD_TEAM_H_

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <cstdint>
#include <vector>

#include "kernels/cpu/row_product.h"

namespace weft::ops {

// The most rows of a step for which a team is useful. ForEachTask, which
// computes products of more rows, has only one thread within a team.
inline constexpr int64_t kMaxTeamRows = kernels::cpu::kFewRows;

// The rows of a weight in groups. Each thread computes some of the groups.
struct SharedRows {
  const char* data = nullptr;
  int64_t num_groups = 0;
  int64_t group_rows = 0;  // The last group may have fewer.
  int64_t group_bytes = 0;
  int64_t grain = 1;  // The fewest groups that are worth waking a thread.
};

// Groups the first `num_rows` rows of a weight, so that threads can share them
// in a product with few rows. `stride` is the number of elements from one row
// to the next.
SharedRows RowsOf(const at::Tensor& weight, int64_t num_rows, int64_t stride);

// Calls `run(begin, end)` for parts of [0, count), on several threads if there
// is more than one part. There are at most count / grain parts, rounded up.
// Uses the team of the calling thread if there is one, otherwise
// at::parallel_for. Rethrows an exception of `run`. If `run` throws on another
// thread of a team, WithThreadTeam rethrows the exception, and later loops of
// the step lack the parts of that thread.
void ParallelFor(int64_t count, int64_t grain,
                 c10::function_ref<void(int64_t, int64_t)> run);

// Calls run(worker, i) for all i < count, on the threads of at::parallel_for. A
// free worker takes the next i, so each worker sees ascending values of i, and
// a slow core delays no other. Workers count from 0 to NumWorkers(count) - 1.
int64_t NumWorkers(int64_t count);
void ForEachTask(int64_t count,
                 c10::function_ref<void(int64_t worker, int64_t i)> run);

// Calls ParallelFor for the groups of a weight. Within a team, each thread runs
// its part and then, while it waits, prefetches its groups of the next weight
// in the `order` of WithThreadTeam.
void ParallelForRows(const SharedRows& rows,
                     c10::function_ref<void(int64_t, int64_t)> run);

// Returns memory of the calling thread for at least `floats` floats, which a
// kernel uses for copies. It is valid until the thread's next call. Fresh
// memory for each product would cost a page fault for each 4 KiB.
float* ThreadMemory(int64_t floats);

// Calls `step` on the calling thread. Until `step` returns, all threads of
// at::parallel_for belong to the caller's team, so at::parallel_for runs loops
// on the calling thread only. `order` has the weights in the order in which
// `step` reads them. A wrong order costs time and changes nothing else.
// Rethrows an exception of `step` or of a loop.
// Threads: any. Makes no team if at::parallel_for has only one thread, or if
// the caller is in a parallel region already.
void WithThreadTeam(const std::vector<SharedRows>& order,
                    c10::function_ref<void()> step);

}  // namespace weft::ops

#endif  // WEFT_SRC_OPS_THREAD_TEAM_H_
