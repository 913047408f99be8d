#include "src/log/set_aside.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "absl/strings/str_cat.h"
#include "src/base/failpoint.h"
#include "src/base/file_io.h"
#include "src/base/status_macros.h"

namespace weft::journal {
namespace {

absl::StatusOr<UniqueFd> MakeFolder(int parent, const std::string& name,
                                    bool may_exist) {
  if (Failpoint("journal.make_aside") ||
      (::mkdirat(parent, name.c_str(), 0700) != 0 &&
       !(may_exist && errno == EEXIST))) {
    return ErrnoStatus(errno, absl::StrCat("making ", name));
  }
  return OpenDirectoryAt(parent, name);
}

absl::Status Link(int from, int to, const std::string& name) {
  if (Failpoint("journal.link_aside") ||
      ::linkat(from, name.c_str(), to, name.c_str(), 0) != 0) {
    return ErrnoStatus(errno, absl::StrCat("setting aside ", name));
  }
  return absl::OkStatus();
}

absl::Status LinkState(const StateFolder& folder, int to) {
  WEFT_RETURN_IF_ERROR(Link(folder.directory(), to, StateFolder::kFormat));
  WEFT_ASSIGN_OR_RETURN(const std::vector<uint64_t> snapshots,
                        folder.Snapshots());
  for (const uint64_t snapshot : snapshots) {
    WEFT_RETURN_IF_ERROR(
        Link(folder.directory(), to, StateFolder::SnapshotName(snapshot)));
  }
  return absl::OkStatus();
}

absl::Status LinkLog(const StateFolder& folder, int to) {
  WEFT_ASSIGN_OR_RETURN(const std::vector<uint64_t> segments,
                        folder.Segments());
  for (const uint64_t segment : segments) {
    WEFT_RETURN_IF_ERROR(
        Link(folder.log_directory(), to, StateFolder::SegmentName(segment)));
  }
  return absl::OkStatus();
}

absl::Status LinkImages(const StateFolder& folder, int to,
                        const std::set<std::string>& images) {
  for (const std::string& image : images) {
    const absl::Status status = Link(folder.images_directory(), to, image);
    if (!status.ok() && !absl::IsNotFound(status)) return status;
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status SetAside(const StateFolder& folder, const std::string& name,
                      const std::set<std::string>& images) {
  WEFT_RETURN_IF_ERROR(CheckPathPart(name));
  WEFT_ASSIGN_OR_RETURN(const UniqueFd all,
                        MakeFolder(folder.directory(), kSetAsideFolder, true));
  WEFT_ASSIGN_OR_RETURN(const UniqueFd to, MakeFolder(all.get(), name, false));
  WEFT_ASSIGN_OR_RETURN(const UniqueFd log, MakeFolder(to.get(), "log", false));
  WEFT_ASSIGN_OR_RETURN(const UniqueFd copies,
                        MakeFolder(to.get(), "images", false));
  WEFT_RETURN_IF_ERROR(LinkState(folder, to.get()));
  WEFT_RETURN_IF_ERROR(LinkLog(folder, log.get()));
  WEFT_RETURN_IF_ERROR(LinkImages(folder, copies.get(), images));
  for (const int made :
       {log.get(), copies.get(), to.get(), all.get(), folder.directory()}) {
    WEFT_RETURN_IF_ERROR(SyncDirectory(made, kSetAsideFolder));
  }
  return absl::OkStatus();
}

}  // namespace weft::journal
