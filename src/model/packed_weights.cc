#include "src/model/packed_weights.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "src/base/mutex.h"
#include "src/base/status_macros.h"
#include "src/model/store_rows.h"
#include "src/model_config/stored_weights.h"
#include "src/weights/mxfp4.h"
#include "src/weights/tensor_reader.h"

namespace weft::model {
namespace {

using weights::Checkpoint;
using weights::DiskTensor;
using weights::kMxfp4Block;

// Adjacent entries that need the same matrix of one expert. The matrix is read
// once.
using Unit = absl::Span<const PackedEntry>;

std::vector<Unit> UnitsOf(const std::vector<PackedEntry>& entries) {
  std::vector<Unit> units;
  for (size_t begin = 0; begin < entries.size();) {
    const StoredPlace& first = entries[begin].place;
    size_t end = begin + 1;
    while (end < entries.size() && entries[end].place.name == first.name &&
           entries[end].place.expert == first.expert) {
      ++end;
    }
    units.push_back(absl::MakeConstSpan(entries).subspan(begin, end - begin));
    begin = end;
  }
  return units;
}

int64_t FirstRow(const PackedEntry& packed) {
  return packed.place.first_row +
         packed.place.row_step * packed.entry->part_row;
}

// Returns the range of rows of the expert's matrix that the unit needs.
parallel::Range RowsOf(Unit unit) {
  parallel::Range rows = {.begin = FirstRow(unit.front()), .end = 0};
  for (const PackedEntry& packed : unit) {
    const int64_t last =
        FirstRow(packed) +
        packed.place.row_step * (packed.entry->part_shape[0] - 1);
    rows.begin = std::min(rows.begin, FirstRow(packed));
    rows.end = std::max(rows.end, last + 1);
  }
  return rows;
}

int64_t ColumnsOf(const PackedEntry& packed) {
  const std::vector<int64_t>& shape = packed.entry->part_shape;
  return shape.size() > 1 ? shape[1] : 1;
}

// Reads the rows and columns that the unit needs. Returns [rows, columns].
absl::StatusOr<at::Tensor> ReadTransposed(const DiskTensor& stored, Unit unit) {
  const WeightEntry& entry = *unit.front().entry;
  const StoredPlace& place = unit.front().place;
  const parallel::Range rows = RowsOf(unit);
  const at::ScalarType dtype = *weights::FloatingType(stored.dtype());
  const auto element_bytes = static_cast<int64_t>(c10::elementSize(dtype));
  const int64_t all_columns = entry.shape.size() > 1 ? entry.shape[1] : 1;
  const at::Tensor part = at::empty({ColumnsOf(unit.front()), rows.size()},
                                    at::TensorOptions().dtype(dtype));
  WEFT_RETURN_IF_ERROR(stored.Read(
      {.first_row = place.expert * all_columns + entry.part_column,
       .num_rows = part.size(0),
       .first_byte = static_cast<uint64_t>(rows.begin * element_bytes),
       .num_bytes = static_cast<uint64_t>(rows.size() * element_bytes)},
      weights::BytesOf(part)));
  return part.t();
}

// Returns the rows and columns that the unit needs, in f32. Reads whole rows,
// because a rank's columns may end within an MXFP4 block.
absl::StatusOr<at::Tensor> ReadMxfp4(const Checkpoint& checkpoint, Unit unit) {
  const StoredPlace& place = unit.front().place;
  const std::vector<StoredPart> parts = PartsOf(place);
  const parallel::Range rows = RowsOf(unit);
  const int64_t row_blocks = place.shape[2];
  const int64_t first = place.expert * place.shape[1] + rows.begin;
  const auto bytes = at::TensorOptions().dtype(at::kByte);
  const at::Tensor blocks =
      at::empty({rows.size() * row_blocks, kMxfp4Block / 2}, bytes);
  const at::Tensor scales = at::empty({rows.size(), row_blocks}, bytes);
  WEFT_ASSIGN_OR_RETURN(const DiskTensor stored_blocks,
                        checkpoint.Find(parts[0].name));
  WEFT_RETURN_IF_ERROR(
      stored_blocks.Read({.first_row = first * row_blocks,
                          .num_rows = blocks.size(0),
                          .num_bytes = static_cast<uint64_t>(blocks.size(1))},
                         weights::BytesOf(blocks)));
  WEFT_ASSIGN_OR_RETURN(const DiskTensor stored_scales,
                        checkpoint.Find(parts[1].name));
  WEFT_RETURN_IF_ERROR(
      stored_scales.Read({.first_row = first,
                          .num_rows = scales.size(0),
                          .num_bytes = static_cast<uint64_t>(row_blocks)},
                         weights::BytesOf(scales)));
  const at::Tensor wide = at::empty({rows.size(), row_blocks * kMxfp4Block});
  if (const absl::Status widened = weights::WidenMxfp4(
          weights::BytesOf(blocks), weights::BytesOf(scales),
          absl::MakeSpan(wide.mutable_data_ptr<float>(), wide.numel()));
      !widened.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat(weights::QuotedTensor(parts[1].name), ", expert ",
                     place.expert, ": ", widened.message()));
  }
  return wide.narrow(1, unit.front().entry->part_column,
                     ColumnsOf(unit.front()));
}

int64_t UnitBytes(const Checkpoint& checkpoint, Unit unit) {
  const StoredPlace& place = unit.front().place;
  const int64_t rows = RowsOf(unit).size();
  if (place.form == StoredForm::kMxfp4) {
    return rows * place.shape[2] * (kMxfp4Block / 2 + 1);
  }
  const auto stored = checkpoint.Find(place.name);
  const size_t bytes =
      stored.ok() ? weights::ScalarTypeBytes(stored->dtype()) : 0;
  return rows * ColumnsOf(unit.front()) * static_cast<int64_t>(bytes);
}

absl::Status ReadUnit(const Checkpoint& checkpoint, Unit unit) {
  const StoredPlace& place = unit.front().place;
  at::Tensor matrix;
  if (place.form == StoredForm::kMxfp4) {
    WEFT_ASSIGN_OR_RETURN(matrix, ReadMxfp4(checkpoint, unit));
  } else {
    WEFT_ASSIGN_OR_RETURN(const DiskTensor stored, checkpoint.Find(place.name));
    WEFT_ASSIGN_OR_RETURN(matrix, ReadTransposed(stored, unit));
  }
  const int64_t begin = RowsOf(unit).begin;
  for (const PackedEntry& packed : unit) {
    const at::Tensor rows = matrix.slice(0, FirstRow(packed) - begin,
                                         matrix.size(0), packed.place.row_step);
    const int64_t count = packed.entry->part_shape[0];
    WEFT_RETURN_IF_ERROR(StoreRows(*packed.entry, rows.narrow(0, 0, count),
                                   packed.destination.view({count, -1})));
  }
  return absl::OkStatus();
}

}  // namespace

int64_t PackedBytes(const Checkpoint& checkpoint,
                    const std::vector<PackedEntry>& entries) {
  int64_t bytes = 0;
  for (const Unit unit : UnitsOf(entries)) bytes += UnitBytes(checkpoint, unit);
  return bytes;
}

absl::Status ReadPacked(const Checkpoint& checkpoint,
                        const std::vector<PackedEntry>& entries,
                        const std::function<void(int64_t)>& on_read) {
  const std::vector<Unit> units = UnitsOf(entries);
  Mutex mu;
  absl::Status result;
  std::atomic<size_t> next = 0;
  std::atomic<bool> failed = false;
  const auto run = [&](int64_t, int64_t) {
    const at::InferenceMode no_autograd;
    for (size_t i = next++; i < units.size() && !failed; i = next++) {
      const absl::Status status = ReadUnit(checkpoint, units[i]);
      if (status.ok()) {
        on_read(UnitBytes(checkpoint, units[i]));
        continue;
      }
      failed = true;
      const MutexLock lock(&mu);
      result.Update(status);
    }
  };
  at::parallel_for(0, at::get_num_threads(), /*grain_size=*/1, run);
  return result;
}

}  // namespace weft::model
