// One adapter on the device: its flat buffers and its versions.
//
// Legend: N parameters of the adapter (AdapterLayout::num_parameters).
#ifndef WEFT_SRC_LORA_ADAPTER_H_
#define WEFT_SRC_LORA_ADAPTER_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "src/peft/adapter_layout.h"
#include "src/request/adapter.h"

namespace weft::lora {

// Identifies one set of weights. No two sets in the life of a process have the
// same id. A copy gets its own id, because it may be written to.
// Threads: any.
class WeightsId {
 public:
  WeightsId();
  WeightsId(const WeightsId&) : WeightsId() {}
  WeightsId& operator=(const WeightsId&) = delete;

  [[nodiscard]] uint64_t value() const { return value_; }  // >= 1.

 private:
  uint64_t value_;
};

// An immutable set of weights. Shared by the adapter (its latest version), its
// snapshots, and the samples and batches that pinned it.
struct AdapterVersion {
  uint64_t number = 0;  // Counts the versions of one adapter.
  WeightsId id;
  std::shared_ptr<const AdapterLayout> layout;
  at::Tensor weights_N;  // [N] f32, the master copy.
  at::Tensor compute_N;  // [N] in the model dtype; weights_N itself for f32.

  // Views into `flat`, which has the layout's shape (weights or a gradient).
  // A of every factor of the group, stacked: [total_rank, in].
  [[nodiscard]] at::Tensor StackedA(const at::Tensor& flat,
                                    const GroupLayout& group) const;
  // A and B of one factor: [rank, in], [out, rank].
  [[nodiscard]] at::Tensor A(const at::Tensor& flat,
                             const LoraFactor& factor) const;
  [[nodiscard]] at::Tensor B(const at::Tensor& flat,
                             const LoraFactor& factor) const;
  // The master copy, on the host.
  [[nodiscard]] std::vector<float> HostWeights() const;
};

using AdapterVersionPtr = std::shared_ptr<const AdapterVersion>;

// An adapter's weights, gradient and optimizer state, on the host. A checkpoint
// stores it.
struct AdapterState {
  std::vector<float> weights;
  std::vector<float> gradient;
  std::vector<float> moment1;
  std::vector<float> moment2;
  uint64_t optim_steps = 0;
};

// A version off the device.
struct VersionImage {
  uint64_t number = 0;
  at::Tensor weights_N;                       // [N] f32 on the host.
  std::weak_ptr<const AdapterVersion> alive;  // Set while someone pins it.
};

[[nodiscard]] VersionImage ImageOf(const AdapterVersionPtr& version);
// Restores the version. While the old object is pinned it is returned;
// otherwise a new object with the same bytes and the same number.
[[nodiscard]] AdapterVersionPtr RestoreVersion(
    const VersionImage& image,
    const std::shared_ptr<const AdapterLayout>& layout,
    at::ScalarType compute_dtype, at::Device device);

// An adapter off the device, with everything that it needs to go on. If the
// adapter is on the CPU, the image shares its tensors and copies none.
struct AdapterImage {
  uint64_t optim_steps = 0;
  at::Tensor gradient_N;  // [N] f32 on the host, as the others.
  at::Tensor moment1_N;
  at::Tensor moment2_N;
  std::vector<VersionImage> versions;  // The latest first, then pinned ones.

  // All tensors, in a fixed order.
  [[nodiscard]] std::vector<at::Tensor*> Tensors();
  // Bytes of the image of an adapter with N parameters.
  [[nodiscard]] static uint64_t NumBytes(int64_t num_parameters,
                                         size_t num_versions);
};

// Threads: engine thread only.
class Adapter {
 public:
  // A new adapter, initialised as PEFT does it (src/lora/lora_init.h).
  Adapter(const LoraConfig& config, const ModelShape& shape,
          at::ScalarType compute_dtype, at::Device device);
  // An adapter that comes back from the host.
  Adapter(const LoraConfig& config, std::shared_ptr<const AdapterLayout> layout,
          const AdapterImage& image, at::ScalarType compute_dtype,
          at::Device device);

  [[nodiscard]] const LoraConfig& config() const { return config_; }
  [[nodiscard]] const std::shared_ptr<const AdapterLayout>& shared_layout()
      const {
    return layout_;
  }
  // The image has only the latest version. REQUIRES: no batch is running.
  [[nodiscard]] AdapterImage ToImage() const;
  [[nodiscard]] const AdapterLayout& layout() const { return *layout_; }
  [[nodiscard]] const AdapterVersionPtr& latest() const { return latest_; }
  [[nodiscard]] uint64_t optim_steps() const { return optim_steps_; }
  // Bytes of all buffers on the device.
  [[nodiscard]] uint64_t resident_bytes() const;

  // Gradient of the work in progress. A micro-batch adds here; the accumulator
  // changes only when a whole request has succeeded.
  [[nodiscard]] at::Tensor& scratch() { return scratch_N_; }
  void ClearScratch() { scratch_N_.zero_(); }
  void CommitScratch() { gradient_N_.add_(scratch_N_); }

  // Buffers of an optimizer step: read the gradient and latest()->weights_N,
  // update the moments in place, write the new weights to NextWeights(), then
  // FinishStep() publishes them and clears the gradient.
  [[nodiscard]] at::Tensor& gradient() { return gradient_N_; }
  [[nodiscard]] at::Tensor& moment1() { return moment1_N_; }
  [[nodiscard]] at::Tensor& moment2() { return moment2_N_; }
  // Returns the latest version's own buffer if that version is not pinned,
  // otherwise a new one. Allocates all memory that FinishStep needs, so that a
  // step without memory fails before it changes anything.
  [[nodiscard]] at::Tensor NextWeights();
  void FinishStep(at::Tensor next_weights);

  // Copies to and from the host. SetState takes vectors of the layout's size
  // (empty gradient or moments: zeros) and publishes a new version.
  [[nodiscard]] AdapterState GetState() const;
  void SetState(const AdapterState& state);

 private:
  // Makes `weights` the latest version, with the next number.
  void Publish(at::Tensor weights);

  LoraConfig config_;
  std::shared_ptr<const AdapterLayout> layout_;
  at::ScalarType compute_dtype_;
  AdapterVersionPtr latest_;
  at::Tensor next_compute_N_;  // Made by NextWeights; not for f32.
  at::Tensor gradient_N_;
  at::Tensor scratch_N_;
  at::Tensor moment1_N_;
  at::Tensor moment2_N_;
  uint64_t optim_steps_ = 0;
};

}  // namespace weft::lora

#endif  // WEFT_SRC_LORA_ADAPTER_H_
