// Loops over the threads of a decode step on a CPU.
//
// A decode step runs about five loops per layer, each over the rows of a
// weight or over the heads of attention. Each loop lasts a few microseconds,
// and memory is what limits it. Between two loops, the thread of the step does
// small work, and all other threads wait. WithThreadTeam keeps LibTorch's
// threads in one parallel region for the whole step. So a loop starts faster,
// and a thread that waits prefetches its rows of the next weight: memory is
// read while nothing is computed.
#ifndef WEFT_SRC_OPS_THREAD_TEAM_H_
#define WEFT_SRC_OPS_THREAD_TEAM_H_

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <cstdint>
#include <vector>

#include "kernels/cpu/skinny_product.h"

namespace weft::ops {

// The most rows of a step for which a team is useful. With more, some products
// are those of ATen, which has no threads within a team.
inline constexpr int64_t kMaxTeamRows = kernels::cpu::kSkinnyRows;

// The rows of a weight, in the groups that threads share.
struct SharedRows {
  const char* data = nullptr;
  int64_t num_groups = 0;
  int64_t group_rows = 0;  // The last group may have fewer.
  int64_t group_bytes = 0;
  int64_t grain = 1;  // The fewest groups that are worth waking a thread.
};

// Returns the groups of `num_rows` rows that are `stride` elements apart. A
// product of few rows with the weight shares these groups.
[[nodiscard]] SharedRows RowsOf(const at::Tensor& weight, int64_t num_rows,
                                int64_t stride);

// Calls `run(begin, end)` for parts of [0, count), on several threads at once.
// A part has at least `grain` iterations, except the last. Uses the team of the
// calling thread if there is one, and otherwise at::parallel_for. Both cut
// [0, count) at the same places. Rethrows an exception of `run`, in a team
// possibly only when WithThreadTeam returns.
void ParallelFor(int64_t count, int64_t grain,
                 c10::function_ref<void(int64_t, int64_t)> run);

// As ParallelFor over the groups of a weight. In a team, each thread then
// prefetches its groups of the weight that follows in `order`.
void ParallelForRows(const SharedRows& rows,
                     c10::function_ref<void(int64_t, int64_t)> run);

// Calls `step` on the calling thread. Until it returns, all threads of
// at::parallel_for belong to the caller's team, so at::parallel_for itself runs
// loops on the calling thread only. `order` has the weights in the order in
// which `step` reads them; a wrong order costs time and changes nothing else.
// Rethrows an exception of `step` or of a loop.
// Threads: any. Runs `step` without a team if there is only one thread, or in
// the loop of another team.
void WithThreadTeam(const std::vector<SharedRows>& order,
                    c10::function_ref<void()> step);

}  // namespace weft::ops

#endif  // WEFT_SRC_OPS_THREAD_TEAM_H_
