// Histograms of logits in the sampler. A key is an integer that sorts like its
// logit (KeyOf). A bucket is a range of keys.
#ifndef WEFT_KERNELS_CUDA_SAMPLE_HISTOGRAM_CUH_
#define WEFT_KERNELS_CUDA_SAMPLE_HISTOGRAM_CUH_

#include "kernels/cuda/block_scan.cuh"
#include "kernels/cuda/device.cuh"

namespace weft::kernels::cuda {

constexpr int kBuckets = 2048;
// The number of threads in a block of CountKernel.
constexpr int kCountThreads = 512;

// For each bucket: the number of tokens with a weight above 0, and the sum of
// their weights.
struct alignas(16) Histogram {
  uint64_t weights[kBuckets];
  uint32_t counts[kBuckets];
};

// A histogram of one block's tokens, in shared memory. A weight is stored as
// two halves, because shared memory has no fast 64-bit atomic addition.
struct alignas(16) BlockHistogram {
  uint32_t counts[kBuckets];
  uint32_t low[kBuckets];
  uint32_t high[kBuckets];

  // Sets the histogram to 0. All threads call it. The histogram is clear after
  // the next barrier.
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
  // Adds this histogram to `sum`, the histogram of the whole row. All threads
  // call it, after a barrier.
  __device__ void AddTo(Histogram* sum) const {
    for (int i = static_cast<int>(threadIdx.x); i < kBuckets;
         i += kCountThreads) {
      if (counts[i] == 0) continue;
      atomicAdd(&sum->counts[i], counts[i]);
      // CUDA's atomicAdd takes only this type of 64-bit integer.
      atomicAdd(reinterpret_cast<unsigned long long*>(&sum->weights[i]),
                static_cast<unsigned long long>(high[i]) << 32 | low[i]);
    }
  }
};

// The result of Buckets::Find: a bucket, and the weight of all buckets above
// it.
struct Bucket {
  uint32_t index;
  uint32_t count;
  uint64_t weight;
  uint64_t weight_above;
  uint64_t rest;  // The target minus the sum over the buckets above.
};

// A row's histogram in the registers of a block's threads. The first thread has
// the buckets with the largest keys.
class Buckets {
 public:
  // All threads construct it, after all blocks have written the histogram.
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

  __device__ uint64_t num_tokens() const { return num_tokens_; }
  __device__ uint64_t weight() const { return weight_; }

  // Adds up the buckets, starting at the largest keys. Returns the bucket at
  // which the running sum reaches `target`. Adds numbers of tokens if `counts`,
  // otherwise weights. `target` is from 1 to the sum of all buckets. All
  // threads call it.
  __device__ Bucket Find(bool counts, uint64_t target) const {
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
    // All threads wait here, because the next call overwrites `found`, which
    // other threads may still read.
    __syncthreads();
    return bucket;
  }

 private:
  static constexpr int kOfThread = kBuckets / kCountThreads;
  __device__ static int First() {
    return kBuckets - 1 - static_cast<int>(threadIdx.x) * kOfThread;
  }

  uint32_t counts_[kOfThread];
  uint64_t weights_[kOfThread];
  // Sums over this thread's buckets (own), over the buckets of all earlier
  // threads (above), and over all buckets.
  uint64_t own_count_ = 0, own_weight_ = 0;
  uint64_t count_above_ = 0, weight_above_ = 0;
  uint64_t num_tokens_ = 0, weight_ = 0;
};

}  // namespace weft::kernels::cuda

#endif  // WEFT_KERNELS_CUDA_SAMPLE_HISTOGRAM_CUH_
