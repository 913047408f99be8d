// The adapters of the daemon: their tensors, which only the engine thread
// touches, and their public facts, which any thread may read.
//
// An adapter is on the device, or its image is on the host, or its image's
// tensors are in a file and the table knows which. Where an adapter goes is
// decided elsewhere (src/sched/residency.h); the table keeps what is where.
#ifndef WEFT_SRC_ENGINE_ADAPTER_TABLE_H_
#define WEFT_SRC_ENGINE_ADAPTER_TABLE_H_

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "src/base/mutex.h"
#include "src/lora/adapter.h"
#include "src/request/adapter.h"

namespace weft::engine {

class AdapterTable {
 public:
  AdapterTable(const lora::ModelShape& shape, at::ScalarType compute_dtype,
               at::Device device, int max_adapters, int max_per_tenant)
      : shape_(shape),
        compute_dtype_(compute_dtype),
        device_(device),
        max_adapters_(max_adapters),
        max_per_tenant_(max_per_tenant) {}

  // Engine thread.

  // ALREADY_EXISTS, RESOURCE_EXHAUSTED (all slots, or all of the tenant, in
  // use).
  [[nodiscard]] absl::Status CheckNew(const std::string& adapter_id,
                                      const std::string& tenant) const;
  // Errors as CheckNew.
  [[nodiscard]] absl::StatusOr<lora::Adapter*> Create(
      const std::string& adapter_id, const std::string& tenant,
      const LoraConfig& config);
  // Null when there is none, or when it is not on the device.
  [[nodiscard]] lora::Adapter* Find(const std::string& adapter_id);
  // False when there is none. Versions that others pinned live on.
  bool Erase(const std::string& adapter_id);
  // Renews the public facts after a change.
  void Publish(const std::string& adapter_id, uint64_t last_step);

  // ALREADY_EXISTS when the name pins another version. Returns the version.
  [[nodiscard]] absl::StatusOr<uint64_t> PublishSnapshot(
      const std::string& adapter_id, const std::string& name);
  [[nodiscard]] absl::Status ReleaseSnapshot(const std::string& adapter_id,
                                             const std::string& name);
  // Latest version when `snapshot` is empty; the adapter is on the device or
  // unknown. NOT_FOUND.
  [[nodiscard]] absl::StatusOr<lora::AdapterVersionPtr> Version(
      const std::string& adapter_id, const std::string& snapshot);

  // Moves; the adapter exists.

  // Bytes of its image.
  [[nodiscard]] uint64_t ImageBytes(const std::string& adapter_id) const;
  // On the device: makes the image, which may throw c10::Error. On the host:
  // shares the image. On disk: gives the image without tensors.
  [[nodiscard]] lora::AdapterImage Image(const std::string& adapter_id) const;
  // Frees what the adapter has on the device.
  void MoveToHost(const std::string& adapter_id, lora::AdapterImage image);
  // Frees the image's tensors too; they are in `file`.
  void MoveToDisk(const std::string& adapter_id, lora::AdapterImage image,
                  std::string file);
  // May throw c10::Error; then nothing has changed.
  void MoveToDevice(const std::string& adapter_id,
                    const lora::AdapterImage& image);
  // Empty unless it is on disk.
  [[nodiscard]] std::string File(const std::string& adapter_id) const;

  // Any thread.

  [[nodiscard]] absl::StatusOr<AdapterInfo> Info(
      const std::string& adapter_id) const;
  [[nodiscard]] std::vector<AdapterInfo> Infos() const;
  [[nodiscard]] uint64_t resident_bytes() const;
  [[nodiscard]] const lora::ModelShape& shape() const { return shape_; }

 private:
  struct Snapshot {
    uint64_t number = 0;
    lora::AdapterVersionPtr version;  // Null off the device.
  };
  struct Entry {
    std::string tenant;
    LoraConfig config;
    std::shared_ptr<const lora::AdapterLayout> layout;
    std::optional<lora::Adapter> adapter;  // On the device.
    lora::AdapterImage image;              // Off the device.
    std::string file;                      // Where the image's tensors are.
    std::map<std::string, Snapshot> snapshots;
    absl::Time created_at;
    uint64_t last_step = 0;

    [[nodiscard]] AdapterLocation location() const;
  };

  // Distinct versions that the adapter holds, the latest first.
  [[nodiscard]] static std::vector<lora::AdapterVersionPtr> Versions(
      const Entry& entry);
  void MoveAway(const std::string& adapter_id, lora::AdapterImage image,
                std::string file);
  void Renew(const std::string& adapter_id, const Entry& entry);

  const lora::ModelShape shape_;
  const at::ScalarType compute_dtype_;
  const at::Device device_;
  const int max_adapters_;
  const int max_per_tenant_;
  std::map<std::string, Entry> entries_;

  mutable Mutex mu_;
  std::map<std::string, AdapterInfo> infos_ ABSL_GUARDED_BY(mu_);
};

// "adapter 'x' does not exist".
[[nodiscard]] absl::Status NoSuchAdapter(const std::string& adapter_id);

}  // namespace weft::engine

#endif  // WEFT_SRC_ENGINE_ADAPTER_TABLE_H_
