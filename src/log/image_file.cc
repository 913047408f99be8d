// The file's bytes, where u32 and u64 are little-endian numbers:
// "WEFTIMG1" | u64 number of blocks | for each block: u64 number of floats,
// u32 CRC32C (0 for a block of zeros), u32 0 for a block of zeros, otherwise 1
// | u32 CRC32C of everything before | bytes of the blocks that are not all zero
#include "src/log/image_file.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "src/base/files/failpoint.h"
#include "src/base/files/file_io.h"
#include "src/base/status_macros.h"
#include "src/log/log_format.h"

namespace weft::log {
namespace {

constexpr std::string_view kImageMagic = "WEFTIMG1";
constexpr size_t kBlockBytes = 16;

std::string_view Bytes(std::span<const float> block) {
  return {reinterpret_cast<const char*>(block.data()), block.size_bytes()};
}

bool AllZero(std::string_view bytes) {
  return bytes.empty() ||
         (bytes[0] == 0 &&
          std::memcmp(bytes.data(), bytes.data() + 1, bytes.size() - 1) == 0);
}

void AppendBlock(std::span<const float> block, uint32_t crc, bool stored,
                 std::string* table) {
  AppendNumber(uint64_t{block.size()}, table);
  AppendNumber(crc, table);
  AppendNumber(uint32_t{stored}, table);
}

std::string TableHead(size_t num_blocks) {
  std::string table(kImageMagic);
  AppendNumber(uint64_t{num_blocks}, &table);
  return table;
}

size_t TableBytes(size_t num_blocks) {
  return TableHead(num_blocks).size() + num_blocks * kBlockBytes +
         sizeof(uint32_t);
}

absl::Status Damaged(const std::string& name, const std::string& how) {
  return absl::DataLossError(absl::StrCat("image \"", name, "\" ", how));
}

absl::StatusOr<UniqueFd> OpenImage(const StateFolder& folder,
                                   const std::string& name) {
  WEFT_RETURN_IF_ERROR(CheckPathPart(name));
  UniqueFd fd;
  if (!Failpoint("journal.open_image")) {
    fd = UniqueFd(::openat(folder.images_directory(), name.c_str(),
                           O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  }
  if (fd.get() < 0) {
    if (errno == ENOENT) return Damaged(name, "is missing");
    return ErrnoStatus(errno, "opening " + name);
  }
  return fd;
}

// Reads and checks the table of an image of `num_blocks` blocks. Returns its
// rows, kBlockBytes bytes for each block.
absl::StatusOr<std::string> ReadTable(int fd, size_t num_blocks,
                                      const std::string& name) {
  std::string table(TableBytes(num_blocks), '\0');
  WEFT_ASSIGN_OR_RETURN(const size_t size, ReadAt(fd, 0, table, name));
  const size_t sum = table.size() - sizeof(uint32_t);
  const std::string head = TableHead(num_blocks);
  if (table.compare(0, head.size(), head) != 0) {
    return Damaged(name, absl::StrCat("does not have ", num_blocks, " blocks"));
  }
  if (size < table.size() ||
      NumberAt<uint32_t>(table, sum) !=
          Crc32c(std::string_view(table).substr(0, sum))) {
    return Damaged(name, "has a table with another sum");
  }
  return table.substr(head.size(), num_blocks * kBlockBytes);
}

// Reads a block and advances `offset` past its bytes.
absl::Status ReadBlock(int fd, std::string_view row, std::span<float> block,
                       const std::string& name, uint64_t* offset) {
  if (NumberAt<uint64_t>(row, 0) != block.size()) {
    return Damaged(name,
                   absl::StrCat("has a block of ", NumberAt<uint64_t>(row, 0),
                                " floats, not ", block.size()));
  }
  if (NumberAt<uint32_t>(row, 12) == 0) {
    std::fill(block.begin(), block.end(), 0.0F);
    return absl::OkStatus();
  }
  const std::span<char> bytes(reinterpret_cast<char*>(block.data()),
                              block.size_bytes());
  WEFT_ASSIGN_OR_RETURN(const size_t size, ReadAt(fd, *offset, bytes, name));
  if (size < bytes.size()) return Damaged(name, "is cut short");
  if (Crc32c(Bytes(block)) != NumberAt<uint32_t>(row, 8)) {
    return Damaged(name, "has a block with another sum");
  }
  *offset += bytes.size();
  return absl::OkStatus();
}

}  // namespace

absl::Status WriteImage(const StateFolder& folder, const std::string& name,
                        const std::vector<std::span<const float>>& blocks) {
  std::string table = TableHead(blocks.size());
  std::vector<std::string_view> pieces(1);
  for (const std::span<const float> block : blocks) {
    const std::string_view bytes = Bytes(block);
    const bool stored = !AllZero(bytes);
    AppendBlock(block, stored ? Crc32c(bytes) : 0, stored, &table);
    if (stored) pieces.push_back(bytes);
  }
  AppendNumber(Crc32c(table), &table);
  pieces[0] = table;
  return PublishFileAt(folder.images_directory(), name, pieces, false);
}

absl::Status ReadImage(const StateFolder& folder, const std::string& name,
                       const std::vector<std::span<float>>& blocks) {
  WEFT_ASSIGN_OR_RETURN(const UniqueFd fd, OpenImage(folder, name));
  WEFT_ASSIGN_OR_RETURN(const std::string table,
                        ReadTable(fd.get(), blocks.size(), name));
  uint64_t offset = TableBytes(blocks.size());
  std::string_view rows = table;
  for (const std::span<float> block : blocks) {
    WEFT_RETURN_IF_ERROR(ReadBlock(fd.get(), rows, block, name, &offset));
    rows.remove_prefix(kBlockBytes);
  }
  WEFT_ASSIGN_OR_RETURN(const uint64_t size, FileSize(fd.get(), name));
  if (size != offset) return Damaged(name, "is longer than its blocks");
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> CheckImage(const StateFolder& folder,
                                    const std::string& name,
                                    size_t num_blocks) {
  std::vector<std::vector<float>> values;
  uint64_t size = 0;
  {
    WEFT_ASSIGN_OR_RETURN(const UniqueFd fd, OpenImage(folder, name));
    WEFT_ASSIGN_OR_RETURN(const std::string rows,
                          ReadTable(fd.get(), num_blocks, name));
    WEFT_ASSIGN_OR_RETURN(size, FileSize(fd.get(), name));
    for (size_t at = 0; at < rows.size(); at += kBlockBytes) {
      values.emplace_back(NumberAt<uint64_t>(rows, at));
    }
  }
  const std::vector<std::span<float>> blocks(values.begin(), values.end());
  WEFT_RETURN_IF_ERROR(ReadImage(folder, name, blocks));
  return size;
}

absl::Status CheckImageTable(const StateFolder& folder, const std::string& name,
                             size_t num_blocks) {
  WEFT_ASSIGN_OR_RETURN(const UniqueFd fd, OpenImage(folder, name));
  WEFT_ASSIGN_OR_RETURN(const std::string rows,
                        ReadTable(fd.get(), num_blocks, name));
  uint64_t end = TableBytes(num_blocks);
  for (size_t at = 0; at < rows.size(); at += kBlockBytes) {
    const bool stored = NumberAt<uint32_t>(rows, at + 12) != 0;
    if (stored) end += NumberAt<uint64_t>(rows, at) * sizeof(float);
  }
  WEFT_ASSIGN_OR_RETURN(const uint64_t size, FileSize(fd.get(), name));
  if (size != end) return Damaged(name, "has another size than its table says");
  return absl::OkStatus();
}

absl::Status RemoveImage(const StateFolder& folder, const std::string& name) {
  return RemoveFileAt(folder.images_directory(), name);
}

}  // namespace weft::log
