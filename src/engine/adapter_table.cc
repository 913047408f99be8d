#include "src/engine/adapter_table.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "src/base/status_macros.h"

namespace weft::engine {

absl::Status NoSuchAdapter(const std::string& adapter_id) {
  return absl::NotFoundError(
      absl::StrCat("adapter_id: '", adapter_id, "' does not exist"));
}

absl::Status AdapterTable::CheckNew(const std::string& adapter_id,
                                    const std::string& tenant) const {
  if (entries_.contains(adapter_id)) {
    return absl::AlreadyExistsError(
        absl::StrCat("adapter_id: '", adapter_id, "' exists"));
  }
  if (static_cast<int>(entries_.size()) >= max_adapters_) {
    return absl::ResourceExhaustedError(
        absl::StrCat("all ", max_adapters_,
                     " adapter slots are in use (--max-adapters); delete one"));
  }
  const auto of_tenant = std::ranges::count_if(
      entries_, [&](const auto& e) { return e.second.tenant == tenant; });
  if (of_tenant >= max_per_tenant_) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "all ", max_per_tenant_, " adapter slots of tenant '", tenant,
        "' are in use (--max-adapters-per-tenant); delete one"));
  }
  return absl::OkStatus();
}

absl::StatusOr<lora::Adapter*> AdapterTable::Create(
    const std::string& adapter_id, const std::string& tenant,
    const LoraConfig& config) {
  WEFT_RETURN_IF_ERROR(CheckNew(adapter_id, tenant));
  lora::Adapter adapter(config, shape_, compute_dtype_, device_);
  Entry& entry = entries_[adapter_id];
  entry.tenant = tenant;
  entry.config = config;
  entry.layout = adapter.shared_layout();
  entry.adapter = std::move(adapter);
  entry.created_at = absl::Now();
  Renew(adapter_id, entry);
  return &*entry.adapter;
}

lora::Adapter* AdapterTable::Find(const std::string& adapter_id) {
  const auto it = entries_.find(adapter_id);
  if (it == entries_.end() || !it->second.adapter) return nullptr;
  return &*it->second.adapter;
}

bool AdapterTable::Erase(const std::string& adapter_id) {
  if (entries_.erase(adapter_id) == 0) return false;
  MutexLock lock(&mu_);
  infos_.erase(adapter_id);
  return true;
}

void AdapterTable::Publish(const std::string& adapter_id, uint64_t last_step) {
  const auto it = entries_.find(adapter_id);
  if (it == entries_.end()) return;
  it->second.last_step = last_step;
  Renew(adapter_id, it->second);
}

absl::StatusOr<uint64_t> AdapterTable::PublishSnapshot(
    const std::string& adapter_id, const std::string& name) {
  const auto it = entries_.find(adapter_id);
  if (it == entries_.end()) return NoSuchAdapter(adapter_id);
  Entry& entry = it->second;
  const lora::AdapterVersionPtr& latest = entry.adapter->latest();
  const auto [snapshot, inserted] = entry.snapshots.try_emplace(
      name, Snapshot{.number = latest->number, .version = latest});
  if (!inserted && snapshot->second.number != latest->number) {
    return absl::AlreadyExistsError(absl::StrCat(
        "name: snapshot '", name, "' pins version ", snapshot->second.number,
        ", the adapter is at ", latest->number, "; release it first"));
  }
  Renew(adapter_id, entry);
  return latest->number;
}

absl::Status AdapterTable::ReleaseSnapshot(const std::string& adapter_id,
                                           const std::string& name) {
  const auto it = entries_.find(adapter_id);
  if (it == entries_.end()) return NoSuchAdapter(adapter_id);
  Entry& entry = it->second;
  if (entry.snapshots.erase(name) == 0) {
    return absl::NotFoundError(
        absl::StrCat("name: snapshot '", name, "' does not exist"));
  }
  // On disk the image goes on telling what the file holds.
  if (entry.location() == AdapterLocation::kHost) {
    const uint64_t latest = entry.image.versions.front().number;
    std::erase_if(entry.image.versions, [&](const lora::VersionImage& version) {
      return version.number != latest &&
             std::ranges::none_of(entry.snapshots, [&](const auto& snapshot) {
               return snapshot.second.number == version.number;
             });
    });
  }
  Renew(adapter_id, entry);
  return absl::OkStatus();
}

absl::StatusOr<lora::AdapterVersionPtr> AdapterTable::Version(
    const std::string& adapter_id, const std::string& snapshot) {
  const auto it = entries_.find(adapter_id);
  if (it == entries_.end()) return NoSuchAdapter(adapter_id);
  if (snapshot.empty()) return it->second.adapter->latest();
  const auto found = it->second.snapshots.find(snapshot);
  if (found == it->second.snapshots.end()) {
    return absl::NotFoundError(
        absl::StrCat("snapshot: '", snapshot, "' does not exist"));
  }
  return found->second.version;
}

absl::StatusOr<AdapterInfo> AdapterTable::Info(
    const std::string& adapter_id) const {
  MutexLock lock(&mu_);
  const auto it = infos_.find(adapter_id);
  if (it == infos_.end()) return NoSuchAdapter(adapter_id);
  return it->second;
}

std::vector<AdapterInfo> AdapterTable::Infos() const {
  MutexLock lock(&mu_);
  std::vector<AdapterInfo> infos;
  infos.reserve(infos_.size());
  for (const auto& [id, info] : infos_) infos.push_back(info);
  return infos;
}

uint64_t AdapterTable::resident_bytes() const {
  MutexLock lock(&mu_);
  uint64_t bytes = 0;
  for (const auto& [id, info] : infos_) bytes += info.resident_bytes;
  return bytes;
}

AdapterLocation AdapterTable::Entry::location() const {
  if (adapter) return AdapterLocation::kDevice;
  return file.empty() ? AdapterLocation::kHost : AdapterLocation::kDisk;
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

uint64_t AdapterTable::ImageBytes(const std::string& adapter_id) const {
  const Entry& entry = entries_.at(adapter_id);
  const size_t versions =
      entry.adapter ? Versions(entry).size() : entry.image.versions.size();
  return lora::AdapterImage::NumBytes(entry.layout->num_parameters(), versions);
}

lora::AdapterImage AdapterTable::Image(const std::string& adapter_id) const {
  const Entry& entry = entries_.at(adapter_id);
  if (!entry.adapter) return entry.image;
  lora::AdapterImage image = entry.adapter->ToImage();
  const std::vector<lora::AdapterVersionPtr> versions = Versions(entry);
  for (size_t v = 1; v < versions.size(); ++v) {
    image.versions.push_back(lora::ImageOf(versions[v]));
  }
  return image;
}

void AdapterTable::MoveToHost(const std::string& adapter_id,
                              lora::AdapterImage image) {
  MoveAway(adapter_id, std::move(image), "");
}

void AdapterTable::MoveToDisk(const std::string& adapter_id,
                              lora::AdapterImage image, std::string file) {
  for (at::Tensor* tensor : image.Tensors()) tensor->reset();
  MoveAway(adapter_id, std::move(image), std::move(file));
}

void AdapterTable::MoveAway(const std::string& adapter_id,
                            lora::AdapterImage image, std::string file) {
  Entry& entry = entries_.at(adapter_id);
  entry.adapter.reset();
  for (auto& [name, snapshot] : entry.snapshots) snapshot.version.reset();
  entry.image = std::move(image);
  entry.file = std::move(file);
  Renew(adapter_id, entry);
}

void AdapterTable::MoveToDevice(const std::string& adapter_id,
                                const lora::AdapterImage& image) {
  Entry& entry = entries_.at(adapter_id);
  lora::Adapter adapter(entry.config, entry.layout, image, compute_dtype_,
                        device_);
  std::map<uint64_t, lora::AdapterVersionPtr> versions = {
      {adapter.latest()->number, adapter.latest()}};
  // Some versions in the file may have been released since.
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
  entry.file.clear();
  Renew(adapter_id, entry);
}

std::string AdapterTable::File(const std::string& adapter_id) const {
  return entries_.at(adapter_id).file;
}

void AdapterTable::Renew(const std::string& adapter_id, const Entry& entry) {
  MutexLock lock(&mu_);
  AdapterInfo& info = infos_[adapter_id];
  info.adapter_id = adapter_id;
  info.tenant = entry.tenant;
  info.config = entry.config;
  info.last_step = entry.last_step;
  info.num_parameters = static_cast<uint64_t>(entry.layout->num_parameters());
  info.location = entry.location();
  info.created_at = entry.created_at;
  // Off the device the others are what they were.
  if (entry.adapter) {
    info.optim_steps = entry.adapter->optim_steps();
    info.version = entry.adapter->latest()->number;
  }
  info.resident_bytes = entry.adapter ? entry.adapter->resident_bytes() : 0;
  info.snapshots.clear();
  for (const auto& [name, snapshot] : entry.snapshots) {
    info.snapshots.push_back(name);
  }
}

}  // namespace weft::engine
