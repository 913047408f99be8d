// Keeps the tensors of all adapters.
//
// An adapter's tensors are on the device, in an image on the host
// (lora::AdapterImage), or in a file that the table names.
// src/dispatch/residency.h decides when an adapter moves.
#ifndef WEFT_SRC_ENGINE_ADAPTERS_ADAPTER_TABLE_H_
#define WEFT_SRC_ENGINE_ADAPTERS_ADAPTER_TABLE_H_

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

// A checkpoint as it was when it had this time of creation.
struct CheckpointSource {
  std::string adapter_id;
  std::string name;
  absl::Time created_at;
};

// Names the file that holds the tensors of an adapter on disk.
struct ImageFile {
  std::string name;      // Empty if the adapter is not on disk.
  bool durable = false;  // The state folder owns the file, or it is that of a
                         // checkpoint, so a move never removes it.
  // Set if the weights are those of a checkpoint, of the same name.
  std::optional<CheckpointSource> checkpoint = {};
};

// The snapshots that an adapter may have.
inline constexpr size_t kMaxSnapshots = 64;

class AdapterTable {
 public:
  AdapterTable(const model_config::ModelShape& shape,
               at::ScalarType compute_dtype, at::Device device)
      : shape_(shape), compute_dtype_(compute_dtype), device_(device) {}

  // Creates an adapter on the device. If Create throws c10::Error, the adapter
  // does not exist.
  lora::Adapter& Create(AdapterKey key, const LoraConfig& config,
                        absl::Time created_at = absl::Now());
  // Adds an adapter of an earlier process or of a checkpoint. `file` has the
  // tensors of `image`, and is durable.
  void AddOnDisk(AdapterKey key, const LoraConfig& config,
                 lora::AdapterImage image,
                 const std::map<std::string, uint64_t>& snapshots,
                 ImageFile file, absl::Time created_at);
  // Returns the adapter, or null if it does not exist or is not on the device.
  lora::Adapter* Find(AdapterKey key);
  // Removes the adapter. Returns false if it does not exist. A version stays
  // alive while an AdapterVersionPtr refers to it.
  bool Erase(AdapterKey key);
  // Returns the facts that the table knows of the adapter. REQUIRES: the
  // adapter exists.
  dispatch::AdapterFacts Facts(AdapterKey key) const;

  // Keeps the latest version alive under the name `name`, and returns its
  // number. REQUIRES: the adapter is on the device or does not exist. Errors:
  // ALREADY_EXISTS (another version has the name), RESOURCE_EXHAUSTED (the
  // adapter has kMaxSnapshots), NOT_FOUND.
  absl::StatusOr<uint64_t> PublishSnapshot(AdapterKey key,
                                           const std::string& name);
  // Removes the snapshot `name`. Errors: NOT_FOUND.
  absl::Status ReleaseSnapshot(AdapterKey key, const std::string& name);
  // Returns the snapshot's version, or the latest one if `snapshot` is empty.
  // REQUIRES: the adapter is on the device or does not exist. Errors:
  // NOT_FOUND.
  absl::StatusOr<lora::AdapterVersionPtr> Version(
      AdapterKey key, const std::string& snapshot) const;

  // Returns the bytes that OnDevice takes for the version that Borrow returns.
  // REQUIRES: as Borrow. Errors: NOT_FOUND.
  absl::StatusOr<int64_t> CopyBytes(AdapterKey key,
                                    const std::string& snapshot) const;
  // Returns what Borrow has returned, if someone still has it; else null.
  // REQUIRES: the adapter exists and is not on the device.
  lora::AdapterVersionPtr Borrowed(AdapterKey key,
                                   const std::string& snapshot) const;
  // Returns what Version returns, but on the host, for an adapter that is not
  // on the device and stays where it is. `image` is the adapter's, with its
  // tensors. If the version is alive already, returns it. Errors: NOT_FOUND.
  // May throw c10::Error.
  absl::StatusOr<lora::AdapterVersionPtr> Borrow(
      AdapterKey key, const std::string& snapshot,
      const lora::AdapterImage& image);
  // Returns a copy of the version on the device, or the version itself if it is
  // there. May throw c10::Error.
  lora::AdapterVersionPtr OnDevice(
      const lora::AdapterVersionPtr& version) const;

  // The methods below require that the adapter exists.

  // Returns the bytes of the adapter's image.
  uint64_t ImageBytes(AdapterKey key) const;
  // Returns the adapter's image. If the adapter is on a GPU, copies the tensors
  // and may throw c10::Error. If the adapter is on a CPU device or on the host,
  // the image shares its tensors with the table. If the adapter is on disk, the
  // image has no tensors.
  lora::AdapterImage Image(AdapterKey key) const;
  // Keeps `image` and frees the adapter's memory on the device.
  void MoveToHost(AdapterKey key, lora::AdapterImage image);
  // Keeps `image` without its tensors, which are in the spill file `file`.
  // Frees the adapter's memory on the device.
  void MoveToDisk(AdapterKey key, lora::AdapterImage image, std::string file);
  // Copies the tensors of `image` to the device and drops the image in the
  // table. If MoveToDevice throws c10::Error, nothing has changed.
  void MoveToDevice(AdapterKey key, const lora::AdapterImage& image);
  ImageFile File(AdapterKey key) const;
  // Returns the names of the adapter's snapshots and the numbers of their
  // versions.
  std::map<std::string, uint64_t> Snapshots(AdapterKey key) const;

  // Threads: any.
  const model_config::ModelShape& shape() const { return shape_; }

 private:
  struct Published {
    uint64_t number = 0;
    lora::AdapterVersionPtr version;  // Null unless the adapter is on the
                                      // device.
  };
  struct Entry {
    LoraConfig config;
    std::shared_ptr<const lora::AdapterLayout> layout;
    std::optional<lora::Adapter> adapter;  // Set while on the device.
    lora::AdapterImage image;              // Set while not on the device.
    ImageFile file;                        // Set while on disk.
    std::map<std::string, Published> snapshots;
    absl::Time created_at;

    AdapterLocation location() const;
  };

  // Returns the latest version and then the other versions that have a
  // snapshot, each once.
  static std::vector<lora::AdapterVersionPtr> Versions(const Entry& entry);
  static uint64_t NumImageBytes(const Entry& entry);
  // Returns the number of the version that Version returns, for an adapter that
  // is not on the device. Errors: NOT_FOUND.
  static absl::StatusOr<uint64_t> NumberOf(const Entry& entry,
                                           const std::string& snapshot);
  void MoveAway(AdapterKey key, lora::AdapterImage image, ImageFile file);

  const model_config::ModelShape shape_;
  const at::ScalarType compute_dtype_;
  const at::Device device_;
  std::map<AdapterKey, Entry> entries_;
};

}  // namespace weft::engine

#endif  // WEFT_SRC_ENGINE_ADAPTERS_ADAPTER_TABLE_H_
