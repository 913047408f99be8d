// Packs: adjacent elements of a row that a thread loads or stores together. The
// template parameter kN of a kernel is the number of elements in a pack. kN is
// kWidth<T> for an element type T if all rows begin at multiples of 16 bytes
// and consist of whole packs. Otherwise kN is 1.
#ifndef WEFT_KERNELS_CUDA_PACK_CUH_
#define WEFT_KERNELS_CUDA_PACK_CUH_

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kernels/cuda/device.cuh"

namespace weft::kernels::cuda {

inline constexpr int kAccessBytes = 16;

using Word [[gnu::may_alias]] = unsigned;

// The number of elements that the widest load or store moves.
template <typename T>
inline constexpr int kWidth = kAccessBytes / static_cast<int>(sizeof(T));

// A pack of kN adjacent elements. A pack of more than 16 bytes takes several
// accesses.
template <typename T, int kN>
struct alignas(kN * sizeof(T) < kAccessBytes ? kN * sizeof(T)
                                             : kAccessBytes) Pack {
  static_assert((kN & (kN - 1)) == 0);
  T elements[kN];

  __device__ float operator[](int i) const { return ToFloat(elements[i]); }
  __device__ void Set(int i, float x) { Store(x, &elements[i]); }
};

// Loads a pack, in accesses of at most 16 bytes.
template <int kN, typename T>
__device__ Pack<T, kN> LoadPack(const T* from) {
  return *reinterpret_cast<const Pack<T, kN>*>(from);
}
template <int kN, typename T>
__device__ void StorePack(const Pack<T, kN>& pack, T* to) {
  // __stwb stores a word at once. The compiler would split some plain
  // assignments into narrower stores.
  if constexpr (sizeof(pack) % kAccessBytes == 0) {
#pragma unroll
    for (size_t i = 0; i < sizeof(pack) / kAccessBytes; ++i) {
      __stwb(reinterpret_cast<uint4*>(to) + i,
             reinterpret_cast<const uint4*>(&pack)[i]);
    }
  } else if constexpr (sizeof(pack) == sizeof(uint2)) {
    __stwb(reinterpret_cast<uint2*>(to), reinterpret_cast<const uint2&>(pack));
  } else if constexpr (sizeof(pack) == sizeof(Word)) {
    __stwb(reinterpret_cast<Word*>(to), reinterpret_cast<const Word&>(pack));
  } else {
    *reinterpret_cast<Pack<T, kN>*>(to) = pack;
  }
}

// The packs of a row that one thread computes: pack threadIdx.x and every
// blockDim.x-th pack after it. The first kKept of them stay in registers
// between Read and Finish. A Part holds the packs of several tensors at one
// index.
template <typename Part, int kKept>
class ThreadRow {
 public:
  // For each of the thread's packs i of a row of `count` packs, calls part =
  // load(i) and then visit(i, part). Loads all kept parts before the first
  // visit, so that the loads overlap.
  template <typename Load, typename Visit>
  __device__ void Read(int count, Load load, Visit visit) {
#pragma unroll
    for (int j = 0; j < kKept; ++j) {
      if (Index(j) < count) kept_[j] = load(Index(j));
    }
#pragma unroll
    for (int j = 0; j < kKept; ++j) {
      if (Index(j) < count) visit(Index(j), kept_[j]);
    }
    for (int i = Index(kKept); i < count; i += static_cast<int>(blockDim.x)) {
      Part part = load(i);
      visit(i, part);
    }
  }
  // Calls finish(i, part) for the same packs. A kept part is as `visit` left
  // it. Any other part is loaded again.
  template <typename Load, typename Use>
  __device__ void Finish(int count, Load load, Use finish) {
#pragma unroll
    for (int j = 0; j < kKept; ++j) {
      if (Index(j) < count) finish(Index(j), kept_[j]);
    }
    for (int i = Index(kKept); i < count; i += static_cast<int>(blockDim.x)) {
      finish(i, load(i));
    }
  }

 private:
  static __device__ int Index(int j) {
    return static_cast<int>(threadIdx.x + j * blockDim.x);
  }

  Part kept_[kKept];
};

// Returns the number of threads for a row of `packs` packs: whole warps, and
// enough that each thread has at most `kept` packs, but at most `most` threads.
inline unsigned PackThreads(int64_t packs, int64_t kept, int64_t most) {
  const int64_t warps = CeilDiv(CeilDiv(packs, kept), kWarp);
  return static_cast<unsigned>(warps * kWarp < most ? warps * kWarp : most);
}

// Returns the number of adjacent lanes that share a short row of `packs`: the
// smallest power of two >= `packs`, but at most a whole warp.
inline int LanesOf(int64_t packs) {
  int lanes = 1;
  while (lanes < packs && lanes < kWarp) lanes *= 2;
  return lanes;
}

// Returns whether all rows begin at multiples of 16 bytes. The first row begins
// at `data`. `stride` is the distance between rows, in elements of T.
template <typename T>
bool IsWide(const void* data, int64_t stride) {
  return reinterpret_cast<uintptr_t>(data) % kAccessBytes == 0 &&
         stride % kWidth<T> == 0;
}

// Calls run(width), where decltype(width)::value is the number of elements in a
// pack.
template <typename T, typename Run>
cudaError_t WithWidth(bool is_wide, Run run) {
  return is_wide ? run(std::integral_constant<int, kWidth<T>>())
                 : run(std::integral_constant<int, 1>());
}

// Calls run with a null const T*, where T is the C++ type of `dtype`.
template <typename Run>
cudaError_t WithType(DType dtype, Run run) {
  return dtype == DType::kBf16 ? run(static_cast<const __nv_bfloat16*>(nullptr))
                               : run(static_cast<const float*>(nullptr));
}

// Calls run with a null const T* and a null const W*. T is the type of the
// rows, and W is the type of their weight. Errors: cudaErrorInvalidValue if
// weight_dtype is neither f32 nor `dtype`; and those of run.
template <typename Run>
cudaError_t WithTypes(DType dtype, DType weight_dtype, Run run) {
  return WithType(dtype, [&]<typename T>(const T* t) {
    if (weight_dtype == DType::kF32) {
      return run(t, static_cast<const float*>(nullptr));
    }
    return dtype == weight_dtype ? run(t, t) : cudaErrorInvalidValue;
  });
}

}  // namespace weft::kernels::cuda

#endif  // WEFT_KERNELS_CUDA_PACK_CUH_
