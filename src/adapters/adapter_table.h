// The tensors of the adapters.
//
// An adapter is on the device, or its image is on the host, or the tensors of
// its image are in a file that the table names. src/sched/residency.h decides
// which adapter moves when. Threads: engine thread only, except shape().
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

// The file of the tensors of an adapter on disk.
struct ImageFile {
  std::string name;      // Empty: the adapter is not on disk.
  bool durable = false;  // In the state folder: not ours to remove.
};

class AdapterTable {
 public:
  AdapterTable(const lora::ModelShape& shape, at::ScalarType compute_dtype,
               at::Device device)
      : shape_(shape), compute_dtype_(compute_dtype), device_(device) {}

  // Creates an adapter on the device. May throw c10::Error; then it does not
  // exist.
  lora::Adapter& Create(AdapterKey key, const LoraConfig& config,
                        absl::Time created_at = absl::Now());
  // Adds an adapter of an earlier process. `file` has the tensors of `image`.
  void AddOnDisk(AdapterKey key, const LoraConfig& config,
                 lora::AdapterImage image,
                 const std::map<std::string, uint64_t>& snapshots,
                 const std::string& file, absl::Time created_at);
  // Returns null if there is no such adapter or it is not on the device.
  [[nodiscard]] lora::Adapter* Find(AdapterKey key);
  // Returns false if there is no such adapter. Pinned versions live on.
  bool Erase(AdapterKey key);
  // Returns what clients see of an adapter that exists.
  [[nodiscard]] dispatch::AdapterFacts Facts(AdapterKey key) const;

  // Returns the version. Errors: ALREADY_EXISTS (the name pins another
  // version), NOT_FOUND.
  [[nodiscard]] absl::StatusOr<uint64_t> PublishSnapshot(
      AdapterKey key, const std::string& name);
  // Errors: NOT_FOUND.
  [[nodiscard]] absl::Status ReleaseSnapshot(AdapterKey key,
                                             const std::string& name);
  // Returns the snapshot's version, or the latest one if `snapshot` is empty.
  // The adapter is on the device or unknown. Errors: NOT_FOUND.
  [[nodiscard]] absl::StatusOr<lora::AdapterVersionPtr> Version(
      AdapterKey key, const std::string& snapshot) const;

  // Moves; the adapter exists.

  // Returns the bytes of the adapter's image.
  [[nodiscard]] uint64_t ImageBytes(AdapterKey key) const;
  // Returns the adapter's image. On the device it is made now, which may throw
  // c10::Error. On the host it is shared. On disk it has no tensors.
  [[nodiscard]] lora::AdapterImage Image(AdapterKey key) const;
  // Frees the adapter's memory on the device.
  void MoveToHost(AdapterKey key, lora::AdapterImage image);
  // Also frees the image's tensors, which are in `file`.
  void MoveToDisk(AdapterKey key, lora::AdapterImage image, std::string file);
  // May throw c10::Error, and then changes nothing.
  void MoveToDevice(AdapterKey key, const lora::AdapterImage& image);
  [[nodiscard]] ImageFile File(AdapterKey key) const;
  // Returns the adapter's snapshots and the versions that they pin.
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
    ImageFile file;                        // With the image's tensors.
    std::map<std::string, Snapshot> snapshots;
    absl::Time created_at;

    [[nodiscard]] AdapterLocation location() const;
  };

  // Returns the distinct versions that the adapter holds, the latest first.
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
