// The tensors of all adapters.
//
// An adapter's tensors are on the device, in an image on the host, or in a file
// that the table names. src/sched/residency.h decides when an adapter moves.
// Threads: engine thread only, except shape().
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

// Names the file that holds the tensors of an adapter on disk.
struct ImageFile {
  std::string name;      // Empty if the adapter is not on disk.
  bool durable = false;  // The state folder owns the file, so the table never
                         // removes it.
};

class AdapterTable {
 public:
  AdapterTable(const lora::ModelShape& shape, at::ScalarType compute_dtype,
               at::Device device)
      : shape_(shape), compute_dtype_(compute_dtype), device_(device) {}

  // Creates an adapter on the device. If it throws c10::Error, the adapter does
  // not exist.
  lora::Adapter& Create(AdapterKey key, const LoraConfig& config,
                        absl::Time created_at = absl::Now());
  // Adds an adapter of an earlier process. `file` has the tensors of `image`.
  void AddOnDisk(AdapterKey key, const LoraConfig& config,
                 lora::AdapterImage image,
                 const std::map<std::string, uint64_t>& snapshots,
                 const std::string& file, absl::Time created_at);
  // Returns null if there is no such adapter or it is not on the device.
  [[nodiscard]] lora::Adapter* Find(AdapterKey key);
  // Returns false if there is no such adapter. Pinned versions stay alive.
  bool Erase(AdapterKey key);
  // Returns what clients see of an adapter that exists.
  [[nodiscard]] dispatch::AdapterFacts Facts(AdapterKey key) const;

  // Pins the latest version under the name and returns its number. REQUIRES:
  // the adapter is on the device or unknown. Errors: ALREADY_EXISTS (the name
  // pins another version), NOT_FOUND.
  [[nodiscard]] absl::StatusOr<uint64_t> PublishSnapshot(
      AdapterKey key, const std::string& name);
  // Errors: NOT_FOUND.
  [[nodiscard]] absl::Status ReleaseSnapshot(AdapterKey key,
                                             const std::string& name);
  // Returns the snapshot's version, or the latest one if `snapshot` is empty.
  // REQUIRES: the adapter is on the device or unknown. Errors: NOT_FOUND.
  [[nodiscard]] absl::StatusOr<lora::AdapterVersionPtr> Version(
      AdapterKey key, const std::string& snapshot) const;

  // The moves below require that the adapter exists.

  // Returns the bytes of the adapter's image.
  [[nodiscard]] uint64_t ImageBytes(AdapterKey key) const;
  // Returns the adapter's image. An adapter on the device is copied now, which
  // may throw c10::Error. The host image is shared. An image on disk has no
  // tensors.
  [[nodiscard]] lora::AdapterImage Image(AdapterKey key) const;
  // Frees the adapter's memory on the device.
  void MoveToHost(AdapterKey key, lora::AdapterImage image);
  // Frees the memory of the image's tensors, which `file` holds.
  void MoveToDisk(AdapterKey key, lora::AdapterImage image, std::string file);
  // If it throws c10::Error, nothing has changed.
  void MoveToDevice(AdapterKey key, const lora::AdapterImage& image);
  [[nodiscard]] ImageFile File(AdapterKey key) const;
  // Returns the adapter's snapshots and the versions that they pin.
  [[nodiscard]] std::map<std::string, uint64_t> Snapshots(AdapterKey key) const;

  // Any thread may call this.
  [[nodiscard]] const lora::ModelShape& shape() const { return shape_; }

 private:
  struct Snapshot {
    uint64_t number = 0;
    lora::AdapterVersionPtr version;  // Null unless the adapter is on the
                                      // device.
  };
  struct Entry {
    LoraConfig config;
    std::shared_ptr<const lora::AdapterLayout> layout;
    std::optional<lora::Adapter> adapter;  // Set on the device.
    lora::AdapterImage image;              // Set off the device.
    ImageFile file;                        // Holds the image's tensors.
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
