#include "src/engine/adapters/adapter_table.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace weft::engine {
namespace {

absl::Status NoAdapter() {
  return absl::NotFoundError("adapter_id: the adapter does not exist");
}

absl::Status NoSnapshot(const std::string& snapshot) {
  return absl::NotFoundError(
      absl::StrCat("snapshot: '", snapshot, "' does not exist"));
}

}  // namespace

lora::Adapter& AdapterTable::Create(AdapterKey key, const LoraConfig& config,
                                    absl::Time created_at) {
  lora::Adapter adapter(config, shape_, compute_dtype_, device_);
  Entry& entry = entries_[key];
  entry.config = config;
  entry.layout = adapter.shared_layout();
  entry.adapter = std::move(adapter);
  entry.created_at = created_at;
  return *entry.adapter;
}

void AdapterTable::AddOnDisk(AdapterKey key, const LoraConfig& config,
                             lora::AdapterImage image,
                             const std::map<std::string, uint64_t>& snapshots,
                             ImageFile file, absl::Time created_at) {
  Entry& entry = entries_[key];
  entry.config = config;
  entry.layout = std::make_shared<lora::AdapterLayout>(shape_, config);
  entry.image = std::move(image);
  entry.file = std::move(file);
  for (const auto& [name, number] : snapshots) {
    entry.snapshots[name] = {.number = number, .version = nullptr};
  }
  entry.created_at = created_at;
}

lora::Adapter* AdapterTable::Find(AdapterKey key) {
  const auto it = entries_.find(key);
  if (it == entries_.end() || !it->second.adapter) return nullptr;
  return &*it->second.adapter;
}

bool AdapterTable::Erase(AdapterKey key) { return entries_.erase(key) > 0; }

dispatch::AdapterFacts AdapterTable::Facts(AdapterKey key) const {
  const Entry& entry = entries_.at(key);
  dispatch::AdapterFacts facts{.image_bytes = NumImageBytes(entry)};
  AdapterInfo& info = facts.info;
  info.config = entry.config;
  info.num_parameters = static_cast<uint64_t>(entry.layout->num_parameters());
  info.location = entry.location();
  info.created_at = entry.created_at;
  if (entry.adapter) {
    info.optim_steps = entry.adapter->optim_steps();
    info.optimizer = entry.adapter->optimizer();
    info.accumulated_tokens = entry.adapter->accumulated_tokens();
    info.version = entry.adapter->latest()->number;
    info.resident_bytes =
        entry.adapter->resident_bytes() + facts.image_bytes -
        lora::AdapterImage::NumBytes(entry.layout->num_parameters(), 1);
  } else {
    info.optim_steps = entry.image.optim_steps;
    info.optimizer = entry.image.optimizer;
    info.accumulated_tokens = entry.image.accumulated_tokens;
    info.version = entry.image.versions.front().number;
  }
  for (const auto& [name, snapshot] : entry.snapshots) {
    info.snapshots.push_back(name);
  }
  return facts;
}

absl::StatusOr<uint64_t> AdapterTable::PublishSnapshot(
    AdapterKey key, const std::string& name) {
  const auto it = entries_.find(key);
  if (it == entries_.end()) return NoAdapter();
  Entry& entry = it->second;
  const lora::AdapterVersionPtr& latest = entry.adapter->latest();
  if (entry.snapshots.size() >= kMaxSnapshots &&
      !entry.snapshots.contains(name)) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "name: '", name, "' would be one of more than ", kMaxSnapshots,
        " snapshots of the adapter; call ReleaseSnapshot first"));
  }
  const auto [snapshot, inserted] = entry.snapshots.try_emplace(
      name, Published{.number = latest->number, .version = latest});
  if (!inserted && snapshot->second.number != latest->number) {
    return absl::AlreadyExistsError(absl::StrCat(
        "name: snapshot '", name, "' pins version ", snapshot->second.number,
        ", the adapter is at ", latest->number, "; release it first"));
  }
  return latest->number;
}

absl::Status AdapterTable::ReleaseSnapshot(AdapterKey key,
                                           const std::string& name) {
  const auto it = entries_.find(key);
  if (it == entries_.end()) return NoAdapter();
  Entry& entry = it->second;
  if (entry.snapshots.erase(name) == 0) {
    return absl::NotFoundError(
        absl::StrCat("name: snapshot '", name, "' does not exist"));
  }
  // Leaves the image of an adapter on disk as it is, because the image
  // describes the content of the file.
  if (entry.location() == AdapterLocation::kHost) {
    const uint64_t latest = entry.image.versions.front().number;
    std::erase_if(entry.image.versions, [&](const lora::VersionImage& version) {
      return version.number != latest &&
             std::ranges::none_of(entry.snapshots, [&](const auto& snapshot) {
               return snapshot.second.number == version.number;
             });
    });
  }
  return absl::OkStatus();
}

absl::StatusOr<lora::AdapterVersionPtr> AdapterTable::Version(
    AdapterKey key, const std::string& snapshot) const {
  const auto it = entries_.find(key);
  if (it == entries_.end()) return NoAdapter();
  if (snapshot.empty()) return it->second.adapter->latest();
  const auto found = it->second.snapshots.find(snapshot);
  if (found == it->second.snapshots.end()) return NoSnapshot(snapshot);
  return found->second.version;
}

absl::StatusOr<uint64_t> AdapterTable::NumberOf(const Entry& entry,
                                                const std::string& snapshot) {
  if (snapshot.empty()) return entry.image.versions.front().number;
  const auto found = entry.snapshots.find(snapshot);
  if (found == entry.snapshots.end()) return NoSnapshot(snapshot);
  return found->second.number;
}

absl::StatusOr<int64_t> AdapterTable::CopyBytes(
    AdapterKey key, const std::string& snapshot) const {
  const auto it = entries_.find(key);
  if (it == entries_.end()) return NoAdapter();
  const Entry& entry = it->second;
  WEFT_RETURN_IF_ERROR(NumberOf(entry, snapshot).status());
  const size_t in_compute =
      compute_dtype_ == at::kFloat ? 0 : at::elementSize(compute_dtype_);
  return entry.layout->num_parameters() *
         static_cast<int64_t>(sizeof(float) + in_compute);
}

lora::AdapterVersionPtr AdapterTable::Borrowed(
    AdapterKey key, const std::string& snapshot) const {
  const Entry& entry = entries_.at(key);
  const absl::StatusOr<uint64_t> number = NumberOf(entry, snapshot);
  if (!number.ok()) return nullptr;
  return std::ranges::find(entry.image.versions, *number,
                           &lora::VersionImage::number)
      ->alive.lock();
}

absl::StatusOr<lora::AdapterVersionPtr> AdapterTable::Borrow(
    AdapterKey key, const std::string& snapshot,
    const lora::AdapterImage& image) {
  const auto it = entries_.find(key);
  if (it == entries_.end()) return NoAdapter();
  Entry& entry = it->second;
  WEFT_ASSIGN_OR_RETURN(const uint64_t number, NumberOf(entry, snapshot));
  const auto of_number = [number](auto& versions) {
    return std::ranges::find(versions, number, &lora::VersionImage::number);
  };
  std::weak_ptr<const lora::AdapterVersion>& alive =
      of_number(entry.image.versions)->alive;
  if (lora::AdapterVersionPtr version = alive.lock()) return version;
  lora::AdapterVersionPtr version = lora::RestoreVersion(
      *of_number(image.versions), entry.layout,
      device_.is_cpu() ? compute_dtype_ : at::kFloat, at::kCPU);
  // The version may share its memory with the image. If the adapter comes back
  // meanwhile, it must know that someone uses this version.
  alive = version;
  return version;
}

lora::AdapterVersionPtr AdapterTable::OnDevice(
    const lora::AdapterVersionPtr& version) const {
  if (version->weights_N.device().type() == device_.type()) return version;
  return lora::RestoreVersion(
      {.number = version->number, .weights_N = version->weights_N},
      version->layout, compute_dtype_, device_);
}

AdapterLocation AdapterTable::Entry::location() const {
  if (adapter) return AdapterLocation::kDevice;
  return file.name.empty() ? AdapterLocation::kHost : AdapterLocation::kDisk;
}

std::vector<lora::AdapterVersionPtr> AdapterTable::Versions(
    const Entry& entry) {
  std::vector<lora::AdapterVersionPtr> versions = {entry.adapter->latest()};
  for (const auto& [name, snapshot] : entry.snapshots) {
    if (std::ranges::find(versions, snapshot.version) == versions.end()) {
      versions.push_back(snapshot.version);
    }
  }
  return versions;
}

uint64_t AdapterTable::ImageBytes(AdapterKey key) const {
  return NumImageBytes(entries_.at(key));
}

uint64_t AdapterTable::NumImageBytes(const Entry& entry) {
  const size_t versions =
      entry.adapter ? Versions(entry).size() : entry.image.versions.size();
  return lora::AdapterImage::NumBytes(entry.layout->num_parameters(), versions);
}

lora::AdapterImage AdapterTable::Image(AdapterKey key) const {
  const Entry& entry = entries_.at(key);
  if (!entry.adapter) return entry.image;
  lora::AdapterImage image = entry.adapter->ToImage();
  const std::vector<lora::AdapterVersionPtr> versions = Versions(entry);
  for (size_t v = 1; v < versions.size(); ++v) {
    image.versions.push_back(lora::ImageOf(versions[v]));
  }
  return image;
}

void AdapterTable::MoveToHost(AdapterKey key, lora::AdapterImage image) {
  MoveAway(key, std::move(image), {});
}

void AdapterTable::MoveToDisk(AdapterKey key, lora::AdapterImage image,
                              std::string file) {
  for (at::Tensor* tensor : image.Tensors()) tensor->reset();
  MoveAway(key, std::move(image), {.name = std::move(file)});
}

void AdapterTable::MoveAway(AdapterKey key, lora::AdapterImage image,
                            ImageFile file) {
  Entry& entry = entries_.at(key);
  entry.adapter.reset();
  for (auto& [name, snapshot] : entry.snapshots) snapshot.version.reset();
  entry.image = std::move(image);
  entry.file = std::move(file);
}

void AdapterTable::MoveToDevice(AdapterKey key,
                                const lora::AdapterImage& image) {
  Entry& entry = entries_.at(key);
  lora::Adapter adapter(entry.config, entry.layout, image, compute_dtype_,
                        device_);
  std::map<uint64_t, lora::AdapterVersionPtr> versions = {
      {adapter.latest()->number, adapter.latest()}};
  // Besides the latest version, restores only versions with a snapshot. The
  // image may have other versions, whose snapshots were released since.
  for (const auto& [name, snapshot] : entry.snapshots) {
    if (versions.contains(snapshot.number)) continue;
    versions[snapshot.number] =
        lora::RestoreVersion(*std::ranges::find(image.versions, snapshot.number,
                                                &lora::VersionImage::number),
                             entry.layout, compute_dtype_, device_);
  }
  for (auto& [name, snapshot] : entry.snapshots) {
    snapshot.version = versions.at(snapshot.number);
  }
  entry.adapter = std::move(adapter);
  entry.image = {};
  entry.file = {};
}

ImageFile AdapterTable::File(AdapterKey key) const {
  return entries_.at(key).file;
}

std::map<std::string, uint64_t> AdapterTable::Snapshots(AdapterKey key) const {
  std::map<std::string, uint64_t> numbers;
  for (const auto& [name, snapshot] : entries_.at(key).snapshots) {
    numbers[name] = snapshot.number;
  }
  return numbers;
}

}  // namespace weft::engine
