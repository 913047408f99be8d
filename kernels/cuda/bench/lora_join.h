// A problem of the lora_decode bench. In each of many equal layers, a joined
// launch (a kernel of lora_decode.h) replaces several separate launches.
#ifndef WEFT_KERNELS_CUDA_BENCH_LORA_JOIN_H_
#define WEFT_KERNELS_CUDA_BENCH_LORA_JOIN_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/cuda/bench/buffer.h"
#include "kernels/cuda/lora_decode.h"
#include "kernels/cuda/lora_table_builder.h"
#include "kernels/cuda/rms_norm.h"

namespace weft::kernels::cuda::bench {

enum class JoinKind { kHeads, kGate, kResidual };

// A joined launch in a layer of Llama-3.1-8B. It expands one group of
// projections and, if next_projections > 0, shrinks for the next group.
struct Join {
  const char* name;
  JoinKind kind;
  int64_t inputs;                 // Number of inputs of the expanded group.
  std::vector<int64_t> features;  // Number of outputs of each projection.
  int64_t next_inputs;
  int64_t next_projections;
};
struct Batch {
  int64_t rows;
  int64_t adapters;
};
class JoinProblem {
 public:
  // `join` outlives the problem.
  JoinProblem(const Join& join, const Batch& batch, int64_t rank);

  [[nodiscard]] int64_t num_layers() const { return num_layers_; }
  // Returns the number of bytes that a launch has to read and write: each
  // adapter's matrices once, and for each row the base product and three
  // vectors of `width_` elements.
  [[nodiscard]] double NumBytes() const {
    return 2.0 * static_cast<double>(batch_.adapters * LayerElements() +
                                     batch_.rows * (outputs_ + 3 * width_));
  }
  void RunSeparate(int64_t layer, cudaStream_t stream) const;
  void RunJoined(int64_t layer, cudaStream_t stream) const;
  void CheckResults() const;

 private:
  [[nodiscard]] int64_t LayerElements() const {
    return rank_ * outputs_ +
           join_.next_projections * rank_ * join_.next_inputs;
  }
  [[nodiscard]] int64_t next_rank() const {
    return join_.next_projections * rank_;
  }
  [[nodiscard]] int stride() const {
    return LoraPartStride(static_cast<int64_t>(join_.features.size()) * rank_);
  }
  [[nodiscard]] int64_t SeparateCount() const {
    return LoraFewRowsParts({.max_rank = 1, .inputs = join_.inputs}).count;
  }
  // Returns the number of parts of S that the joined launch reads. The previous
  // launch writes the same number of parts.
  [[nodiscard]] int64_t JoinedCount() const {
    if (join_.kind == JoinKind::kResidual) {
      return join_.inputs == 4096 ? SeparateCount()
                                  : LoraGateParts(join_.inputs);
    }
    return LoraResidualParts(join_.inputs);
  }
  [[nodiscard]] int64_t NextCount() const {
    return join_.kind == JoinKind::kGate ? LoraGateParts(join_.next_inputs)
                                         : LoraResidualParts(join_.next_inputs);
  }
  [[nodiscard]] int64_t NextSize() const {
    return std::max<int64_t>(1, batch_.rows *
                                    std::max<int64_t>(16, NextCount()) *
                                    LoraPartStride(next_rank()));
  }
  [[nodiscard]] std::vector<float> OwnParts() const;
  [[nodiscard]] std::vector<int32_t> Positions() const;
  [[nodiscard]] std::vector<int64_t> Slots() const;
  [[nodiscard]] std::vector<std::byte> TableBytes() const;
  [[nodiscard]] LoraFewRowsProduct ExpandOf(int64_t layer) const;
  [[nodiscard]] LoraFewRowsProduct ShrinkOf(int64_t layer,
                                            const Bf16Buffer& x) const;
  [[nodiscard]] RotaryRows Rotation() const;
  [[nodiscard]] KvSlots Pages() const;
  [[nodiscard]] RmsNormRows NormRows() const;
  [[nodiscard]] LoraParts JoinedParts() const {
    return {.data = joined_parts_.data(),
            .count = static_cast<int>(JoinedCount()),
            .stride = stride()};
  }
  [[nodiscard]] LoraParts NextParts() const {
    return {.data = next_parts_.data(),
            .count = static_cast<int>(NextCount()),
            .stride = LoraPartStride(next_rank())};
  }
  [[nodiscard]] const Bf16Buffer& Result() const {
    return join_.kind == JoinKind::kGate ? out_ : y_;
  }
  // Returns row `row` of the next group's S: the sums of its `count` parts.
  [[nodiscard]] std::vector<float> NextOf(int64_t row, int64_t count) const;

  const Join& join_;
  Batch batch_;
  int64_t rank_, outputs_, width_, num_slots_, num_layers_;
  Bf16Buffer weights_, y_, before_, x_, out_, normed_, weight_;
  LoraTableCapacity capacity_;
  Buffer<std::byte> table_;
  FloatBuffer separate_parts_, joined_parts_, next_parts_, squares_;
  Bf16Buffer k_pages_, v_pages_;
  FloatBuffer cos_, sin_;
  Buffer<int32_t> positions_;
  Buffer<int64_t> slots_;
};

}  // namespace weft::kernels::cuda::bench

#endif  // WEFT_KERNELS_CUDA_BENCH_LORA_JOIN_H_
