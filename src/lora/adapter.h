// One adapter on the device: its versions, gradient and optimizer state.
//
// Legend: N parameters of the adapter (AdapterLayout::num_parameters).
#ifndef WEFT_SRC_LORA_ADAPTER_H_
#define WEFT_SRC_LORA_ADAPTER_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "src/lora/adapter_layout.h"
#include "src/request/adapter.h"

namespace weft::lora {

// Identifies one set of weights. No two sets in a process ever have the same
// id. A copy of an AdapterVersion gets a new id, because the copy's owner may
// change its weights. Threads: any.
class WeightsId {
 public:
  WeightsId();
  WeightsId(const WeightsId&) : WeightsId() {}
  WeightsId& operator=(const WeightsId&) = delete;

  uint64_t value() const { return value_; }  // >= 1.

 private:
  uint64_t value_;
};

// A set of weights of an adapter. It does not change while anyone besides the
// adapter uses it.
struct AdapterVersion {
  uint64_t number = 0;  // 1 for an adapter's first version, then 2, 3, ...
  WeightsId id;
  std::shared_ptr<const AdapterLayout> layout;
  at::Tensor weights_N;  // [N] f32, the master copy. Undefined in a version
                         // that MakeVersion (executor/message.h) makes.
  at::Tensor compute_N;  // [N] in the dtype of the model's activations. It
                         // shares the memory of weights_N if both are f32.

  // StackedA, A and B return views into `flat`, which holds weights or a
  // gradient in the layout's order. StackedA returns the A matrices of all
  // factors of the group as one matrix [total_rank, in]. The group must have at
  // least one factor.
  at::Tensor StackedA(const at::Tensor& flat, const GroupLayout& group) const;
  // Return A [rank, in] and B [out, rank] of one factor.
  at::Tensor A(const at::Tensor& flat, const LoraFactor& factor) const;
  at::Tensor B(const at::Tensor& flat, const LoraFactor& factor) const;
  // Returns a copy of weights_N on the host.
  std::vector<float> HostWeights() const;
};

using AdapterVersionPtr = std::shared_ptr<const AdapterVersion>;

// An adapter's weights, gradient and optimizer state on the host, as a
// checkpoint stores them.
struct AdapterState {
  std::vector<float> weights;
  std::vector<float> gradient;
  std::vector<float> moment1;
  std::vector<float> moment2;
  uint64_t optim_steps = 0;
  // The optimizer that made optim_steps, and whose state the moments are.
  Optimizer optimizer = Optimizer::kAdamW;
  uint64_t accumulated_tokens = 0;  // Of the gradient.
};

// An adapter version, with its weights on the host.
struct VersionImage {
  uint64_t number = 0;
  at::Tensor weights_N;                       // [N] f32 on the host.
  std::weak_ptr<const AdapterVersion> alive;  // The version, while it exists.
};

VersionImage ImageOf(const AdapterVersionPtr& version);
// Restores the version. If the version to which image.alive points exists and
// is on `device`, returns it. Otherwise returns a new version with the image's
// weights and number.
AdapterVersionPtr RestoreVersion(
    const VersionImage& image,
    const std::shared_ptr<const AdapterLayout>& layout,
    at::ScalarType compute_dtype, at::Device device);

// The tensors and the step count of an adapter, on the host. If the adapter is
// on the CPU, its image shares the adapter's tensors and copies nothing.
struct AdapterImage {
  uint64_t optim_steps = 0;
  Optimizer optimizer = Optimizer::kAdamW;
  uint64_t accumulated_tokens = 0;
  at::Tensor gradient_N;  // [N] f32 on the host, like the moments.
  at::Tensor moment1_N;
  at::Tensor moment2_N;
  std::vector<VersionImage> versions;  // The latest version, then the other
                                       // versions that snapshots use.

  // Returns pointers to all tensors, in a fixed order.
  std::vector<at::Tensor*> Tensors();
  // Returns the size of an image with `num_versions` versions, in bytes.
  static uint64_t NumBytes(int64_t num_parameters, size_t num_versions);
};

// A trainable adapter on the device. Threads: engine thread only.
class Adapter {
 public:
  // Creates an adapter with PEFT's initial weights (InitialWeights).
  Adapter(const LoraConfig& config, const model_config::ModelShape& shape,
          at::ScalarType compute_dtype, at::Device device);
  // Restores an adapter from its image.
  Adapter(const LoraConfig& config, std::shared_ptr<const AdapterLayout> layout,
          const AdapterImage& image, at::ScalarType compute_dtype,
          at::Device device);

  const LoraConfig& config() const { return config_; }
  const std::shared_ptr<const AdapterLayout>& shared_layout() const {
    return layout_;
  }
  // Returns an image with only the latest version. REQUIRES: no batch runs.
  AdapterImage ToImage() const;
  const AdapterLayout& layout() const { return *layout_; }
  const AdapterVersionPtr& latest() const { return latest_; }
  uint64_t optim_steps() const { return optim_steps_; }
  // Returns the optimizer that made optim_steps(), and whose state the moments
  // are. Muon's momentum is moment1(), and moment2() is zero. While
  // optim_steps() is 0, it is the one for which the adapter is made, and the
  // next step may be of any optimizer.
  Optimizer optimizer() const { return optimizer_; }
  // REQUIRES: optim_steps() is 0.
  void set_optimizer(Optimizer optimizer) { optimizer_ = optimizer; }
  // Returns the tokens of the requests whose gradients gradient() has.
  uint64_t accumulated_tokens() const { return accumulated_tokens_; }
  // Returns the size of latest(), gradient(), scratch() and moments, in bytes.
  uint64_t resident_bytes() const;

  // The buffer to which the micro-batches of a request add gradients. After the
  // last micro-batch has succeeded, CommitScratch adds this buffer to
  // gradient(). The request has `num_tokens` tokens.
  at::Tensor& scratch() { return scratch_N_; }
  void ClearScratch() { scratch_N_.zero_(); }
  void CommitScratch(int64_t num_tokens) {
    gradient_N_.add_(scratch_N_);
    accumulated_tokens_ += static_cast<uint64_t>(num_tokens);
  }

  // An optimizer step uses the next methods. It reads gradient() and
  // latest()->weights_N, updates the moments in place, and writes the new
  // weights to NextWeights(). Then FinishStep() publishes the new weights and
  // clears the gradient.
  at::Tensor& gradient() { return gradient_N_; }
  at::Tensor& moment1() { return moment1_N_; }
  at::Tensor& moment2() { return moment2_N_; }
  void ClearGradient() {
    gradient_N_.zero_();
    accumulated_tokens_ = 0;
  }
  // Returns the latest version's own buffer if nobody else uses that version,
  // otherwise a new buffer. Also allocates the tensors that FinishStep needs.
  // So a step that runs out of memory fails before it changes the adapter.
  at::Tensor NextWeights();
  void FinishStep(at::Tensor next_weights,
                  Optimizer optimizer = Optimizer::kAdamW);

  // Copy the state to and from the host. SetState publishes a new version. The
  // vectors of `state` have N elements; an empty gradient or moment means
  // zeros.
  AdapterState GetState() const;
  void SetState(const AdapterState& state);

 private:
  // Makes `weights` the latest version and gives it the next number.
  void Publish(at::Tensor weights);

  LoraConfig config_;
  std::shared_ptr<const AdapterLayout> layout_;
  at::ScalarType compute_dtype_;
  AdapterVersionPtr latest_;
  at::Tensor next_compute_N_;  // NextWeights sets it for Publish, unless
                               // compute_dtype_ is f32.
  at::Tensor gradient_N_;
  at::Tensor scratch_N_;
  at::Tensor moment1_N_;
  at::Tensor moment2_N_;
  uint64_t optim_steps_ = 0;
  Optimizer optimizer_ = Optimizer::kAdamW;
  uint64_t accumulated_tokens_ = 0;
};

// A buffer to which a backward pass adds the gradients of an adapter.
struct LoraGradient {
  AdapterVersionPtr version;
  at::Tensor gradient_N;  // [N] f32, in the version's layout.
};

// Each version occurs at most once. If a version of the routing is not in this
// list, its A and B get no gradients, but still contribute to dLoss/dx.
using LoraGradients = std::vector<LoraGradient>;

// Returns the gradient [N] of `version`, or an undefined tensor if the list
// does not have the version.
at::Tensor GradientOf(const LoraGradients& gradients,
                      const AdapterVersionPtr& version);

// Returns a zero gradient for each version, in the order of `versions`, which
// are distinct.
LoraGradients ZeroGradients(const std::vector<AdapterVersionPtr>& versions,
                            at::Device device);

// Returns the initial weights of a new adapter, with PEFT's distributions. A is
// from U(-1/sqrt(in), 1/sqrt(in)), which equals kaiming_uniform(sqrt(5)), and B
// is zero. For the embedding, A is zero and B is from N(0, 1). Each factor
// draws from its own stream, whose key is (seed, expert, layer, module). So an
// adapter with fewer targets gets the same numbers for the targets that it has.
std::vector<float> InitialWeights(const AdapterLayout& layout, uint64_t seed);

}  // namespace weft::lora

#endif  // WEFT_SRC_LORA_ADAPTER_H_
