#include "src/engine/start/open_state.h"

#include <optional>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "src/base/files/file_io.h"
#include "src/base/status_macros.h"
#include "src/checkpoint/disk_checkpoints.h"
#include "src/checkpoint/object_checkpoints.h"
#include "src/log/bucket/standby.h"
#include "src/log/folder/state_folder.h"
#include "src/log/way_out.h"
#include "src/store/open_store.h"

namespace weft::engine {
namespace {

std::string RandomName() {
  std::random_device device;
  return absl::StrFormat("%08x%08x%08x", device(), device(), device());
}

absl::Status OpenFolder(const EngineOptions& options, const std::string& model,
                        OpenedState* opened) {
  WEFT_ASSIGN_OR_RETURN(
      std::unique_ptr<log::StateFolder> folder,
      log::StateFolder::Open(options.state_dir, model,
                             options.accept_base_model_change));
  WEFT_ASSIGN_OR_RETURN(
      opened->running,
      log::RunningSteps::Open(folder->directory(), log::kRunningSteps));
  opened->state = std::move(folder);
  return absl::OkStatus();
}

absl::StatusOr<directory::OwnerAddress> AddressIn(
    const absl::StatusOr<log::SeenManifest>& seen) {
  WEFT_RETURN_IF_ERROR(seen.status());
  if (seen->etag.empty() || seen->manifest.drained) return std::nullopt;
  return seen->manifest.released ? "" : seen->manifest.owner.address;
}

// Opens the store of --state, which must keep conditions.
absl::StatusOr<std::unique_ptr<store::ObjectStore>> OpenObjects(
    const std::string& url, store::StoreMetrics* metrics) {
  absl::StatusOr<std::unique_ptr<store::ObjectStore>> objects =
      store::OpenStore(url, metrics);
  const absl::Status status =
      objects.ok() ? store::CheckConditions(objects->get()) : objects.status();
  if (status.ok()) return objects;
  return absl::Status(
      status.code(),
      absl::StrCat("--state=", store::ShownUrl(url), ": ", status.message()));
}

absl::Status OpenBucket(const EngineOptions& options, const std::string& model,
                        prometheus::Registry* registry, OpenedState* opened) {
  opened->metrics = std::make_unique<BucketMetrics>(registry);
  WEFT_ASSIGN_OR_RETURN(std::unique_ptr<store::ObjectStore> objects,
                        OpenObjects(options.state, &opened->metrics->store));
  WEFT_ASSIGN_OR_RETURN(
      std::unique_ptr<log::StateBucket> bucket,
      log::StateBucket::Open(std::move(objects), model,
                             options.accept_base_model_change));
  WEFT_RETURN_IF_ERROR(bucket->CheckLogs(options.logs));
  opened->bucket = bucket.get();
  opened->state = std::move(bucket);
  return absl::OkStatus();
}

// Opens the steps of `log` that ran when this machine's last process ended.
// Each machine notes by itself which steps end its processes, so such a step
// may end a few of each before all refuse it. Adapters of two logs may have one
// key.
absl::Status OpenRunning(const EngineOptions& options, int log,
                         OpenedState* opened) {
  WEFT_ASSIGN_OR_RETURN(const UniqueFd directory,
                        OpenDirectory(options.spill_root(), "--spill-dir"));
  std::string name = absl::StrCat(log::kRunningSteps, "-", options.instance);
  if (log > 0) absl::StrAppend(&name, "~", log);
  WEFT_ASSIGN_OR_RETURN(opened->running,
                        log::RunningSteps::Open(directory.get(), name));
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<OpenedState> OpenState(const EngineOptions& options,
                                      const std::string& model,
                                      prometheus::Registry* registry) {
  OpenedState opened;
  absl::Status status;
  if (!options.state_dir.empty()) {
    status = OpenFolder(options, model, &opened);
  } else if (!options.state.empty()) {
    status = OpenBucket(options, model, registry, &opened);
  }
  WEFT_RETURN_IF_ERROR(log::WithWayOut(status, options));
  return opened;
}

absl::Status TakeState(const EngineOptions& options,
                       const OnStandby& on_standby, OpenedState* opened) {
  log::StateBucket* const bucket = opened->bucket;
  if (bucket == nullptr) return absl::OkStatus();
  const log::Instance self = {.name = options.instance,
                              .process = RandomName(),
                              .address = options.advertise_address};
  bool waited = false;
  const absl::Status taken =
      log::TakeWhenFree(bucket, options.logs, self, &opened->metrics->owner,
                        [&](const log::Manifest& seen) {
                          waited = true;
                          on_standby(seen.owner.address);
                        });
  WEFT_RETURN_IF_ERROR(log::WithWayOut(taken, options));
  // The one that was named has the state no more.
  if (waited) on_standby("");
  return OpenRunning(options, bucket->owner()->keys().log, opened);
}

std::unique_ptr<directory::Directory> OpenAdapterDirectory(
    const OpenedState& opened, const EngineOptions& options) {
  if (opened.bucket == nullptr) return nullptr;
  store::ObjectStore* const objects = opened.bucket->objects();
  log::LogOwner* const owner = opened.bucket->owner();
  const auto owner_of = [objects](int log) {
    return AddressIn(log::LookAtManifest(*objects, {.log = log}));
  };
  const auto owners = [objects, logs = options.logs] {
    std::vector<absl::StatusOr<directory::OwnerAddress>> addresses;
    for (const auto& seen : log::LookAtManifests(*objects, logs)) {
      addresses.push_back(AddressIn(seen));
    }
    return addresses;
  };
  return std::make_unique<directory::Directory>(
      objects,
      directory::Logs{
          .own = owner->keys().log,
          .epoch = owner->epoch(),
          .count = options.logs,
          .owner = owner_of,
          .owners = owners,
          .confirm_own = [owner] { return owner->Confirm(); },
          .answers = [bucket = opened.bucket] { return bucket->answers(); }});
}

std::unique_ptr<log::Members> OpenMembers(const OpenedState& opened,
                                          const EngineOptions& options,
                                          prometheus::Registry* registry) {
  if (opened.bucket == nullptr) return nullptr;
  return std::make_unique<log::Members>(
      opened.bucket->objects(), opened.bucket->owner()->keys().log,
      options.logs, options.advertise_address, &opened.metrics->owner.samples,
      registry);
}

std::unique_ptr<checkpoint::CheckpointFiles> OpenCheckpoints(
    const OpenedState& opened, const EngineOptions& options) {
  if (opened.bucket == nullptr) {
    return std::make_unique<checkpoint::DiskCheckpoints>(
        options.checkpoint_dir,
        static_cast<uint64_t>(options.disk_reserve_bytes));
  }
  log::LogOwner* const owner = opened.bucket->owner();
  return std::make_unique<checkpoint::ObjectCheckpoints>(
      opened.bucket->objects(), owner->keys().log, owner->epoch(),
      [owner] { return owner->Confirm(); });
}

}  // namespace weft::engine
