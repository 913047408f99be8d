// The bytes of an image, where u32 and u64 are little-endian numbers:
// "WEFTIMG1" | u64 number of blocks | for each block: u64 number of floats,
// u32 CRC32C (0 for a block of zeros), u32 0 for a block of zeros, otherwise 1
// | u32 CRC32C of everything before | bytes of the blocks that are not all zero
#include "src/log/image.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "src/base/status_macros.h"
#include "src/base/threads/at_once.h"
#include "src/log/log_format.h"

namespace weft::log {
namespace {

constexpr std::string_view kImageMagic = "WEFTIMG1";
constexpr size_t kBlockBytes = 16;
constexpr size_t kTablesAtOnce = 16;

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

absl::StatusOr<std::unique_ptr<ImageReader>> Open(const State& state,
                                                  const std::string& name) {
  absl::StatusOr<std::unique_ptr<ImageReader>> image = state.OpenImage(name);
  if (absl::IsNotFound(image.status())) return Damaged(name, "is missing");
  return image;
}

// Reads and checks the table of an image of `num_blocks` blocks. Returns its
// rows, kBlockBytes bytes for each block.
absl::StatusOr<std::string> ReadTable(ImageReader& image, size_t num_blocks,
                                      const std::string& name) {
  std::string table(TableBytes(num_blocks), '\0');
  WEFT_ASSIGN_OR_RETURN(const size_t size, image.Read(0, table));
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
absl::Status ReadBlock(ImageReader& image, std::string_view row,
                       std::span<float> block, const std::string& name,
                       uint64_t* offset) {
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
  WEFT_ASSIGN_OR_RETURN(const size_t size, image.Read(*offset, bytes));
  if (size < bytes.size()) return Damaged(name, "is cut short");
  if (Crc32c(Bytes(block)) != NumberAt<uint32_t>(row, 8)) {
    return Damaged(name, "has a block with another sum");
  }
  *offset += bytes.size();
  return absl::OkStatus();
}

}  // namespace

absl::Status WriteImage(State& state, const std::string& name,
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
  return state.CreateImage(name, pieces);
}

absl::Status ReadImage(const State& state, const std::string& name,
                       const std::vector<std::span<float>>& blocks) {
  WEFT_ASSIGN_OR_RETURN(const std::unique_ptr<ImageReader> image,
                        Open(state, name));
  WEFT_ASSIGN_OR_RETURN(const std::string table,
                        ReadTable(*image, blocks.size(), name));
  uint64_t offset = TableBytes(blocks.size());
  std::string_view rows = table;
  for (const std::span<float> block : blocks) {
    WEFT_RETURN_IF_ERROR(ReadBlock(*image, rows, block, name, &offset));
    rows.remove_prefix(kBlockBytes);
  }
  WEFT_ASSIGN_OR_RETURN(const uint64_t size, image->Size());
  if (size != offset) return Damaged(name, "is longer than its blocks");
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> CheckImage(const State& state, const std::string& name,
                                    size_t num_blocks) {
  std::vector<std::vector<float>> values;
  uint64_t size = 0;
  {
    WEFT_ASSIGN_OR_RETURN(const std::unique_ptr<ImageReader> image,
                          Open(state, name));
    WEFT_ASSIGN_OR_RETURN(const std::string rows,
                          ReadTable(*image, num_blocks, name));
    WEFT_ASSIGN_OR_RETURN(size, image->Size());
    for (size_t at = 0; at < rows.size(); at += kBlockBytes) {
      values.emplace_back(NumberAt<uint64_t>(rows, at));
    }
  }
  const std::vector<std::span<float>> blocks(values.begin(), values.end());
  WEFT_RETURN_IF_ERROR(ReadImage(state, name, blocks));
  return size;
}

absl::Status CheckImageTable(const State& state, const std::string& name,
                             size_t num_blocks) {
  WEFT_ASSIGN_OR_RETURN(const std::unique_ptr<ImageReader> image,
                        Open(state, name));
  WEFT_ASSIGN_OR_RETURN(const std::string rows,
                        ReadTable(*image, num_blocks, name));
  uint64_t end = TableBytes(num_blocks);
  for (size_t at = 0; at < rows.size(); at += kBlockBytes) {
    const bool stored = NumberAt<uint32_t>(rows, at + 12) != 0;
    if (stored) end += NumberAt<uint64_t>(rows, at) * sizeof(float);
  }
  WEFT_ASSIGN_OR_RETURN(const uint64_t size, image->Size());
  if (size != end) return Damaged(name, "has another size than its table says");
  return absl::OkStatus();
}

absl::Status CheckImageTables(const State& state,
                              const std::vector<ImageShape>& images) {
  return RunAtOnce(images.size(), kTablesAtOnce, [&](size_t i) {
    return CheckImageTable(state, images[i].name, images[i].num_blocks);
  });
}

}  // namespace weft::log
