// Copies between a whole adapter and the part of it that one rank trains.
//
// Each rank has an AdapterLayout with its own widths. If the ranks split a
// projection's outputs, a rank has all of A and some rows of B, in one block
// for each kind of feature that the projection makes. If the ranks
// split its inputs, a rank has some columns of A and all of B. For the
// embedding, these columns belong to the rank's tokens. If several ranks have
// the same element of A or B, its value is equal on all of them. The element's
// gradient is the sum of the ranks' gradients, because each rank counts only
// its own features. A rank has no matrices for experts of other ranks.
//
// Legend: N parameters of the whole adapter, M of the rank's part.
#ifndef WEFT_SRC_LORA_ADAPTER_SHARD_H_
#define WEFT_SRC_LORA_ADAPTER_SHARD_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "src/lora/adapter_layout.h"

namespace weft::lora {

class AdapterShard {
 public:
  // Both layouts have the same LoraConfig. `whole` has the model's shape.
  // `local` has the rank's shape, whose widths are the sizes of `ranges`.
  // Throws c10::Error if the two layouts list different layers.
  AdapterShard(const AdapterLayout& whole, const AdapterLayout& local,
               const model_config::ShapeRanges& ranges);

  // Returns a copy of the rank's part [M] of a flat buffer [N]. Slice and AddTo
  // throw c10::Error if a buffer has a wrong size. Threads: any.
  at::Tensor Slice(const at::Tensor& whole_N) const;
  // Adds the rank's gradient to the whole gradient. The whole gradient is
  // complete after the calls for all ranks.
  void AddTo(const at::Tensor& local_M, at::Tensor& whole_N) const;

 private:
  // A matrix of the whole layout, and the block of this matrix that the rank's
  // layout has.
  struct Piece {
    int64_t whole_offset = 0;
    int64_t whole_rows = 0;
    int64_t whole_columns = 0;
    int64_t first_row = 0;
    int64_t first_column = 0;
    int64_t local_offset = 0;
    int64_t rows = 0;
    int64_t columns = 0;
  };
  static at::Tensor BlockOf(const at::Tensor& whole_N, const Piece& piece);
  static at::Tensor PartOf(const at::Tensor& local_M, const Piece& piece);

  int64_t num_whole_ = 0;
  int64_t num_local_ = 0;
  std::vector<Piece> pieces_;
};

}  // namespace weft::lora

#endif  // WEFT_SRC_LORA_ADAPTER_SHARD_H_
