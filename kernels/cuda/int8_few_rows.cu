#include "kernels/cuda/int8_few_rows.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/lora/lora_few_rows.cuh"
#include "kernels/cuda/mma.cuh"

namespace weft::kernels::cuda {
namespace few_int8 {
namespace {

using few_rows::Bf16;
using few_rows::Chunk;

// All warps of a block have the same outputs, but different groups of inputs.
constexpr int kWarps = 8;
constexpr unsigned kThreads = kWarps * kWarp;

// A warp has up to kStages groups in flight from global to shared memory.
constexpr int kStages = 4;

// A block has kRowTiles tiles of rows and kOutputTiles tiles of outputs. With
// many rows, two tiles of outputs share the registers of x. Otherwise the loads
// of x would take longer than those of the weight. The kBlocks blocks of a
// multiprocessor together have 64 or 96 KB of the weight in flight. About 40 KB
// per multiprocessor keep an H100's memory busy.
template <int kTiles>
struct Shape {
  static constexpr int kRowTiles = kTiles;
  // Tiles of x in registers at a time. Eight of them would not fit.
  static constexpr int kBatch = kTiles > 4 ? 4 : kTiles;
  static constexpr int kOutputTiles = kTiles > 2 ? 2 : 1;
  static constexpr int kOutputs = kOutputTiles * kTileOutputs;
  // Chunks that a lane loads from each group of inputs.
  static constexpr int kChunks = 2 * kOutputTiles;
  static constexpr int kWarpWords =
      kStages * kChunks * kWarp * (kInt8Chunk / 4);
  static constexpr size_t kBytes = kWarps * kWarpWords * sizeof(unsigned);
  static constexpr int kBlocks = kTiles > 2 ? 1 : 3;
};

// In each of the kTiles tiles from `first` on, loads the lane's 16 inputs of a
// group from one row. Inputs and rows that do not exist are 0.
template <int kTiles>
__device__ void LoadInputs(const Int8FewRowsProduct& product, int group,
                           int first, Chunk (&x)[kTiles][2]) {
  const auto inputs = static_cast<int>(product.weight.inputs);
  const int input = group * kGroup + Lane() % 4 * kInt8Chunk;
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    const int row = (first + i) * kTileRows + Lane() / 4;
    const Bf16* from = static_cast<const Bf16*>(product.x_MI) +
                       row * static_cast<unsigned>(product.x_stride);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      x[i][half] = few_rows::Load<true>(from, input + half * few_rows::kChunk,
                                        inputs, row < product.num_rows);
    }
  }
}

// Returns the bytes 2 * half and 2 * half + 1 of a word as bf16. Each byte is a
// signed integer whose lower 7 bits are b. So the integer is b or, if negative,
// b - 128. The bf16 with the bits 0x4300 + b is 128 + b. From this bf16, the
// function subtracts 128 (0x4300), or 256 (0x4380) for a negative integer.
__device__ unsigned ToBf16Pair(unsigned word, int half) {
  const unsigned pair =
      __byte_perm(word, 0x43434343, half == 0 ? 0x4140 : 0x4342);
  return SubtractBf16Pairs(pair & 0xFF7FFF7F, pair & 0xFF80FF80);
}

// The left operands of a group's four products.
using Operands = unsigned[4][4];

// Converts the integers of two chunks to bf16 operands. `upper` and `lower` are
// the chunks of outputs g and g + 8 of a tile, where g is Lane() / 4.
__device__ void ToOperands(const Int8Chunk& upper, const Int8Chunk& lower,
                           Operands& operands) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    operands[i][0] = ToBf16Pair(upper.words[i], 0);
    operands[i][1] = ToBf16Pair(lower.words[i], 0);
    operands[i][2] = ToBf16Pair(upper.words[i], 1);
    operands[i][3] = ToBf16Pair(lower.words[i], 1);
  }
}

// Adds a group's products with one tile of rows to the sums. Uses fmaf, so that
// every Shape rounds in the same way and gives the same bits.
__device__ void AddGroup(const Operands& operands, float upper_scale,
                         float lower_scale, const Chunk (&x)[2],
                         float (&sums)[4]) {
  float own[4] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const unsigned* pairs = x[i / 2].pairs + i % 2 * 2;
    MultiplyAdd(operands[i], {pairs[0], pairs[1]}, own);
  }
  sums[0] = fmaf(upper_scale, own[0], sums[0]);
  sums[1] = fmaf(upper_scale, own[1], sums[1]);
  sums[2] = fmaf(lower_scale, own[2], sums[2]);
  sums[3] = fmaf(lower_scale, own[3], sums[3]);
}

// Adds the products of the warp's groups. A warp takes every kWarps-th group.
template <typename S>
__device__ void AddGroups(const Int8FewRowsProduct& product, unsigned* ring,
                          float (&sums)[S::kOutputTiles][S::kRowTiles][4]) {
  const LaneWeight<S> weight(product.weight, ring);
  const int first = WarpIndex();
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) weight.Start(first + i * kWarps, i);
  unsigned scales[S::kChunks];
  weight.LoadScales(first, scales);
  // Reads of x and writes of y must wait for earlier launches.
  WaitForEarlierLaunches();
  int stage = 0;
  for (int group = first; group < weight.num_groups(); group += kWarps) {
    // Starts the copies of a later group before the loads of x and of the
    // scales, because nvcc moves the wait for this group's copies ahead of the
    // loads. The new copies overwrite the stage of the previous group, whose
    // chunks have already been read.
    weight.Start(group + (kStages - 1) * kWarps,
                 (stage + kStages - 1) % kStages);
    Chunk x[S::kBatch][2];
    LoadInputs(product, group, 0, x);
    unsigned next[S::kChunks];
    weight.LoadScales(group + kWarps, next);
    WaitForCopies<kStages - 1>();
    Int8Chunk chunks[S::kChunks];
#pragma unroll
    for (int i = 0; i < S::kChunks; ++i) {
      chunks[i] = weight.Read(i, stage);
    }
    Operands operands[S::kOutputTiles];
#pragma unroll
    for (int i = 0; i < S::kOutputTiles; ++i) {
      ToOperands(chunks[2 * i], chunks[2 * i + 1], operands[i]);
    }
#pragma unroll
    for (int tile = 0; tile < S::kRowTiles; ++tile) {
      if (tile > 0 && tile % S::kBatch == 0) {
        LoadInputs(product, group, tile, x);
      }
#pragma unroll
      for (int i = 0; i < S::kOutputTiles; ++i) {
        AddGroup(operands[i], ScaleOf(scales[2 * i]),
                 ScaleOf(scales[2 * i + 1]), x[tile % S::kBatch],
                 sums[i][tile]);
      }
    }
#pragma unroll
    for (int i = 0; i < S::kChunks; ++i) scales[i] = next[i];
    stage = (stage + 1) % kStages;
  }
}

// Adds the bias to `sum` and stores it as one element of y.
__device__ void StoreResult(const Int8FewRowsProduct& product, int64_t row,
                            int64_t output, float sum) {
  if (product.bias_O != nullptr) {
    sum += ToFloat(static_cast<const Bf16*>(product.bias_O)[output]);
  }
  const int64_t at = row * product.y_stride + output;
  if (product.y_dtype == DType::kF32) {
    static_cast<float*>(product.y_MO)[at] = sum;
  } else {
    Store(sum, static_cast<Bf16*>(product.y_MO) + at);
  }
}

// Adds up the warps' sums for one tile of rows, and stores the results in y.
// `parts` is shared memory for the warps' sums. All threads call it.
template <typename S>
__device__ void StoreTile(const Int8FewRowsProduct& product, int first_row,
                          const float (&sums)[S::kOutputTiles][4],
                          float* parts) {
  // With this distance between rows, lanes write to different banks.
  constexpr int kStride = S::kOutputs + 4;
  constexpr int kPart = kTileRows * kStride;
  static_assert(kPart <= S::kWarpWords);
  static_assert(kTileRows * S::kOutputs <= kThreads);
  // All threads wait here, because other warps may still read the memory that
  // the sums overwrite.
  __syncthreads();
#pragma unroll
  for (int i = 0; i < S::kOutputTiles; ++i) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int row = Lane() % 4 * 2 + k % 2;
      const int output = i * kTileOutputs + Lane() / 4 + k / 2 * kTileRows;
      parts[WarpIndex() * kPart + row * kStride + output] = sums[i][k];
    }
  }
  __syncthreads();
  const int row = static_cast<int>(threadIdx.x) / S::kOutputs;
  const int column = static_cast<int>(threadIdx.x) % S::kOutputs;
  const int64_t output = int64_t{blockIdx.x} * S::kOutputs + column;
  if (row >= kTileRows || first_row + row >= product.num_rows ||
      output >= product.weight.outputs) {
    return;
  }
  float sum = 0;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    sum += parts[warp * kPart + row * kStride + column];
  }
  StoreResult(product, first_row + row, output, sum);
}

template <typename S>
__global__ void __launch_bounds__(kThreads, S::kBlocks)
    Int8FewRowsKernel(Int8FewRowsProduct product) {
  auto* memory = static_cast<unsigned*>(DynamicShared());
  float sums[S::kOutputTiles][S::kRowTiles][4] = {};
  AddGroups<S>(product, memory + WarpIndex() * S::kWarpWords, sums);
#pragma unroll
  for (int tile = 0; tile < S::kRowTiles; ++tile) {
    float own[S::kOutputTiles][4];
#pragma unroll
    for (int i = 0; i < S::kOutputTiles * 4; ++i) {
      own[i / 4][i % 4] = sums[i / 4][tile][i % 4];
    }
    StoreTile<S>(product, tile * kTileRows, own,
                 reinterpret_cast<float*>(memory));
  }
}

template <typename S>
cudaError_t Run(const Int8FewRowsProduct& product, cudaStream_t stream) {
  return LaunchShaped(Int8FewRowsKernel<S>,
                      {.grid_x = CeilDiv(product.weight.outputs, S::kOutputs),
                       .threads = kThreads,
                       .shared_bytes = S::kBytes,
                       .starts_early = true},
                      stream, product);
}

cudaError_t RunTiles(const Int8FewRowsProduct& product, cudaStream_t stream) {
  const int64_t tiles = CeilDiv(product.num_rows, kTileRows);
  if (tiles <= 1) return Run<Shape<1>>(product, stream);
  if (tiles <= 2) return Run<Shape<2>>(product, stream);
  if (tiles <= 4) return Run<Shape<4>>(product, stream);
  return Run<Shape<8>>(product, stream);
}

}  // namespace
}  // namespace few_int8

bool TakesInt8FewRows(const Int8FewRowsProduct& product) {
  return product.num_rows <= kMaxInt8FewRows && TakesInt8(product.weight) &&
         product.weight.stride <= kMaxInt8Stride &&
         product.x_stride <= kMaxInt8Stride &&
         IsWide<__nv_bfloat16>(product.x_MI, product.x_stride);
}

cudaError_t Int8FewRows(const Int8FewRowsProduct& product,
                        cudaStream_t stream) {
  if (!TakesInt8FewRows(product)) return cudaErrorInvalidValue;
  if (product.num_rows == 0 || product.weight.outputs == 0) return cudaSuccess;
  return few_int8::RunTiles(product, stream);
}

}  // namespace weft::kernels::cuda
