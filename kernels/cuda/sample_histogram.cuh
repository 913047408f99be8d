// Histograms of the sampler's keys: how many tokens fall into each bucket, and
// their weights.
#ifndef WEFT_KERNELS_CUDA_SAMPLE_HISTOGRAM_CUH_
#define WEFT_KERNELS_CUDA_SAMPLE_HISTOGRAM_CUH_

#include "kernels/cuda/block_scan.cuh"
#include "kernels/cuda/device.cuh"

namespace weft::kernels::cuda {

constexpr int kBuckets = 2048;
// Threads of a block of the kernel that counts.
constexpr int kCountThreads = 512;

// In each bucket, tokens that can be drawn, and their weights.
struct alignas(16) Histogram {
  uint64_t weights[kBuckets];
  uint32_t counts[kBuckets];
};

// A histogram of one block's tokens in its shared memory. Weights are stored as
// two halves, because there is no fast 64-bit addition.
struct alignas(16) BlockHistogram {
  uint32_t counts[kBuckets];
  uint32_t low[kBuckets];
  uint32_t high[kBuckets];

  // All threads call it. It is complete after the next barrier.
  __device__ void Clear() {
    auto* words = reinterpret_cast<uint4*>(counts);
    for (size_t i = threadIdx.x; i < sizeof(*this) / sizeof(uint4);
         i += kCountThreads) {
      words[i] = {0, 0, 0, 0};
    }
  }
  __device__ void Add(uint32_t bucket, uint64_t weight) {
    atomicAdd(&counts[bucket], 1U);
    const auto own = static_cast<uint32_t>(weight);
    const uint32_t before = atomicAdd(&low[bucket], own);
    const uint32_t carry = before + own < own ? 1 : 0;
    const uint32_t upper = static_cast<uint32_t>(weight >> 32) + carry;
    if (upper != 0) atomicAdd(&high[bucket], upper);
  }
  // Adds it to the row's. All threads call it, after a barrier.
  __device__ void AddTo(Histogram* sum) const {
    for (int i = static_cast<int>(threadIdx.x); i < kBuckets;
         i += kCountThreads) {
      if (counts[i] == 0) continue;
      atomicAdd(&sum->counts[i], counts[i]);
      // CUDA has 64-bit atomic addition only for this type.
      atomicAdd(reinterpret_cast<unsigned long long*>(&sum->weights[i]),
                static_cast<unsigned long long>(high[i]) << 32 | low[i]);
    }
  }
};

// A bucket, and the weight above it.
struct Bucket {
  uint32_t index;
  uint32_t count;
  uint64_t weight;
  uint64_t weight_above;
  uint64_t rest;  // What is left of the target.
};

// A row's histogram, spread over the threads of a block, largest keys first.
class Buckets {
 public:
  // All threads construct it. Other blocks have written the histogram.
  __device__ explicit Buckets(const Histogram& histogram) {
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) {
      counts_[i] = __ldcg(&histogram.counts[First() - i]);
      weights_[i] = __ldcg(&histogram.weights[First() - i]);
    }
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) {
      own_count_ += counts_[i];
      own_weight_ += weights_[i];
    }
    count_above_ = BlockScan(own_count_, &num_tokens_);
    weight_above_ = BlockScan(own_weight_, &weight_);
  }

  [[nodiscard]] __device__ uint64_t num_tokens() const { return num_tokens_; }
  [[nodiscard]] __device__ uint64_t weight() const { return weight_; }

  // Returns the bucket at which the running sum of tokens or weights reaches
  // `target`, from 1 to the whole sum. All threads call it.
  [[nodiscard]] __device__ Bucket Find(bool counts, uint64_t target) const {
    __shared__ Bucket found;
    uint64_t above = counts ? count_above_ : weight_above_;
    const uint64_t own = counts ? own_count_ : own_weight_;
    if (above < target && target - above <= own) {
      uint64_t weight_above = weight_above_;
#pragma unroll
      for (int i = 0; i < kOfThread; ++i) {
        const uint64_t measure = counts ? counts_[i] : weights_[i];
        if (above < target && target - above <= measure) {
          found = {static_cast<uint32_t>(First() - i), counts_[i], weights_[i],
                   weight_above, target - above};
        }
        above += measure;
        weight_above += weights_[i];
      }
    }
    __syncthreads();
    const Bucket bucket = found;
    // Other threads may still read what the next call overwrites.
    __syncthreads();
    return bucket;
  }

 private:
  static constexpr int kOfThread = kBuckets / kCountThreads;
  [[nodiscard]] __device__ static int First() {
    return kBuckets - 1 - static_cast<int>(threadIdx.x) * kOfThread;
  }

  uint32_t counts_[kOfThread];
  uint64_t weights_[kOfThread];
  uint64_t own_count_ = 0, own_weight_ = 0;      // This thread's buckets.
  uint64_t count_above_ = 0, weight_above_ = 0;  // Those of threads before it.
  uint64_t num_tokens_ = 0, weight_ = 0;         // All buckets.
};

}  // namespace weft::kernels::cuda

#endif  // WEFT_KERNELS_CUDA_SAMPLE_HISTOGRAM_CUH_
