// The tensors of the adapters.
//
// An adapter is on the device, or its image is on the host, or its image's
// tensors are in a file and the table knows which. Which one moves when is
// decided elsewhere (src/sched/residency.h); the table keeps what is where.
// Threads: engine thread only, but for shape().
#ifndef WEFT_SRC_ADAPTERS_ADAPTER_TABLE_H_
#define WEFT_SRC_ADAPTERS_ADAPTER_TABLE_H_

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "src/dispatch/adapter_desk.h"
#include "src/lora/adapter.h"
#include "src/request/adapter.h"
#include "src/request/adapter_key.h"

namespace weft::engine {

// Where the tensors of an adapter on disk are.
struct ImageFile {
  std::string name;      // Empty: it is not on disk.
  bool durable = false;  // In the state folder, which keeps it.
};

class AdapterTable {
 public:
  AdapterTable(const lora::ModelShape& shape, at::ScalarType compute_dtype,
               at::Device device)
      : shape_(shape), compute_dtype_(compute_dtype), device_(device) {}

  // A new adapter, on the device. May throw c10::Error; then there is none.
  lora::Adapter& Create(AdapterKey key, const LoraConfig& config,
                        absl::Time created_at = absl::Now());
  // An adapter of an earlier process: `image` has no tensors, `file` has them.
  void AddOnDisk(AdapterKey key, const LoraConfig& config,
                 lora::AdapterImage image,
                 const std::map<std::string, uint64_t>& snapshots,
                 const std::string& file, absl::Time created_at);
  // Null when there is none, or when it is not on the device.
  [[nodiscard]] lora::Adapter* Find(AdapterKey key);
  // False when there is none. Versions that others pinned live on.
  bool Erase(AdapterKey key);
  // What clients see of an adapter that exists.
  [[nodiscard]] dispatch::AdapterFacts Facts(AdapterKey key) const;

  // ALREADY_EXISTS when the name pins another version; NOT_FOUND. Returns the
  // version.
  [[nodiscard]] absl::StatusOr<uint64_t> PublishSnapshot(
      AdapterKey key, const std::string& name);
  // NOT_FOUND.
  [[nodiscard]] absl::Status ReleaseSnapshot(AdapterKey key,
                                             const std::string& name);
  // Latest version when `snapshot` is empty; the adapter is on the device or
  // unknown. NOT_FOUND.
  [[nodiscard]] absl::StatusOr<lora::AdapterVersionPtr> Version(
      AdapterKey key, const std::string& snapshot) const;

  // Moves; the adapter exists.

  // Bytes of its image.
  [[nodiscard]] uint64_t ImageBytes(AdapterKey key) const;
  // The image of one on the device is made now, which may throw c10::Error;
  // that of one on the host is shared; that of one on disk has no tensors.
  [[nodiscard]] lora::AdapterImage Image(AdapterKey key) const;
  // Frees what the adapter has on the device.
  void MoveToHost(AdapterKey key, lora::AdapterImage image);
  // Frees the image's tensors too; they are in `file`.
  void MoveToDisk(AdapterKey key, lora::AdapterImage image, std::string file);
  // May throw c10::Error; then nothing has changed.
  void MoveToDevice(AdapterKey key, const lora::AdapterImage& image);
  [[nodiscard]] ImageFile File(AdapterKey key) const;
  // Its snapshots and the versions that they pin.
  [[nodiscard]] std::map<std::string, uint64_t> Snapshots(AdapterKey key) const;

  // Any thread.
  [[nodiscard]] const lora::ModelShape& shape() const { return shape_; }

 private:
  struct Snapshot {
    uint64_t number = 0;
    lora::AdapterVersionPtr version;  // Null off the device.
  };
  struct Entry {
    LoraConfig config;
    std::shared_ptr<const lora::AdapterLayout> layout;
    std::optional<lora::Adapter> adapter;  // On the device.
    lora::AdapterImage image;              // Off the device.
    ImageFile file;                        // Has the image's tensors.
    std::map<std::string, Snapshot> snapshots;
    absl::Time created_at;

    [[nodiscard]] AdapterLocation location() const;
  };

  // Distinct versions that the adapter holds, the latest first.
  [[nodiscard]] static std::vector<lora::AdapterVersionPtr> Versions(
      const Entry& entry);
  [[nodiscard]] static uint64_t NumImageBytes(const Entry& entry);
  void MoveAway(AdapterKey key, lora::AdapterImage image, ImageFile file);

  const lora::ModelShape shape_;
  const at::ScalarType compute_dtype_;
  const at::Device device_;
  std::map<AdapterKey, Entry> entries_;
};

}  // namespace weft::engine

#endif  // WEFT_SRC_ADAPTERS_ADAPTER_TABLE_H_
