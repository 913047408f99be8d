#include "src/model/decoder_weights.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "src/base/huge_pages.h"
#include "src/base/observe/progress.h"
#include "src/base/status_macros.h"
#include "src/model_config/stored_weights.h"
#include "src/model_config/weight_list.h"
#include "src/ops/host_copy.h"
#include "src/ops/int8_weight.h"
#include "src/weights/checkpoint.h"
#include "src/weights/float_convert.h"
#include "src/weights/tensor_reader.h"
#include "src/weights/tensor_types.h"

namespace weft::model {

using model_config::MatrixFormat;
using model_config::ModelConfig;
using model_config::StoredForm;
using model_config::StoredPart;
using model_config::StoredPlace;
using model_config::WeightEntry;
using model_config::WeightSlot;

namespace {

// Writes rows to `destination`, in the dtype of `destination` or quantised to 8
// bits. Shapes: rows [n, columns] of any floating-point dtype on the CPU.
// Errors: INVALID_ARGUMENT with the name of the entry's tensor, if a number
// that is to be quantised is not finite. Threads: any.
absl::Status StoreRows(const WeightEntry& entry, const at::Tensor& rows,
                       const at::Tensor& destination) {
  if (!ops::IsInt8(destination)) {
    destination.copy_(rows);
    return absl::OkStatus();
  }
  if (!ops::QuantizeRows(rows, destination).has_value()) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat(weights::QuotedTensor(entry.name),
                   " has a number that is not finite, which --weights=int8 "
                   "cannot hold"));
}

// Returns the format in which a ReadPlan writes the entry to `destination`.
// `entry` outlives the plan.
weights::RowFormat FormatOf(const WeightEntry& entry,
                            const at::Tensor& destination) {
  if (!ops::IsInt8(destination)) return {};
  return {.columns = entry.part_shape[1],
          .store = [&entry](const at::Tensor& rows, const at::Tensor& stored) {
            return StoreRows(entry, rows, stored);
          }};
}

// A matrix of experts that a checkpoint stores transposed, in 4 bits, or with
// alternating rows of two matrices: its stored form is not StoredForm::kRows.
// `entry` outlives the object.
struct PackedEntry {
  const WeightEntry* entry;
  StoredPlace place;
  // The rank's part, [rows] or [rows, columns], which may be in 8 bits.
  at::Tensor destination;
};

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

// Returns the number of bytes that ReadPacked reads.
int64_t PackedBytes(const Checkpoint& checkpoint,
                    const std::vector<PackedEntry>& entries) {
  int64_t bytes = 0;
  for (const Unit unit : UnitsOf(entries)) bytes += UnitBytes(checkpoint, unit);
  return bytes;
}

// Fills the destinations on all compute threads. If adjacent entries need the
// same matrix of an expert, reads it once. A thread holds one expert's matrix
// at a time. After each matrix, calls `on_read` on any thread, with the number
// of bytes read.
// REQUIRES: CheckStored accepts all tensors. Errors: those of DiskTensor::Read,
// weights::WidenMxfp4 and StoreRows.
absl::Status ReadPacked(const Checkpoint& checkpoint,
                        const std::vector<PackedEntry>& entries,
                        const std::function<void(int64_t)>& on_read) {
  const std::vector<Unit> units = UnitsOf(entries);
  return weights::ForEachOnThreads(units.size(), [&](size_t i) -> absl::Status {
    WEFT_RETURN_IF_ERROR(ReadUnit(checkpoint, units[i]));
    on_read(UnitBytes(checkpoint, units[i]));
    return absl::OkStatus();
  });
}

constexpr char kEmbeddingName[] = "model.embed_tokens.weight";
constexpr char kHeadName[] = "lm_head.weight";

at::Tensor& FieldOf(ExpertWeights& w, WeightSlot slot) {
  switch (slot) {
    case WeightSlot::kRouter:
      return w.router_EH;
    case WeightSlot::kRouterBias:
      return w.router_bias_E;
    case WeightSlot::kRouterCorrection:
      return w.router_correction_E;
    case WeightSlot::kExpertGateUp:
      return w.gate_up_GH;
    case WeightSlot::kExpertGateUpBias:
      return w.gate_up_bias_G;
    case WeightSlot::kExpertDownBias:
      return w.down_bias_D;
    case WeightSlot::kExpertDown:
      return w.down_DF;
    case WeightSlot::kSharedGateUp:
      return w.shared_gate_up_S2H;
    case WeightSlot::kSharedDown:
      return w.shared_down_HS;
    default:
      return w.shared_gate_1H;
  }
}

at::Tensor& FieldOf(LayerWeights& w, WeightSlot slot) {
  switch (slot) {
    case WeightSlot::kInputNorm:
      return w.input_norm_H;
    case WeightSlot::kQkv:
      return w.qkv.weight_OI;
    case WeightSlot::kQkvBias:
      return w.qkv.bias_O;
    case WeightSlot::kQNorm:
      return w.q_norm_C;
    case WeightSlot::kKNorm:
      return w.k_norm_C;
    case WeightSlot::kSinks:
      return w.sinks_H;
    case WeightSlot::kO:
      return w.o.weight_OI;
    case WeightSlot::kOBias:
      return w.o.bias_O;
    case WeightSlot::kAttentionOutNorm:
      return w.attention_out_norm_H;
    case WeightSlot::kMlpNorm:
      return w.mlp_norm_H;
    case WeightSlot::kGateUp:
      return w.gate_up.weight_OI;
    case WeightSlot::kGateUpBias:
      return w.gate_up.bias_O;
    case WeightSlot::kDown:
      return w.down.weight_OI;
    case WeightSlot::kDownBias:
      return w.down.bias_O;
    case WeightSlot::kConv:
      return w.conv_WR1;
    case WeightSlot::kDecay:
      return w.a_log_H;
    case WeightSlot::kDtBias:
      return w.dt_bias_H;
    case WeightSlot::kDeltaNorm:
      return w.delta_norm_V;
    case WeightSlot::kMlpOutNorm:
      return w.mlp_out_norm_H;
    default:
      return FieldOf(w.experts, slot);
  }
}

at::Tensor& FieldOf(DecoderWeights& w, const WeightEntry& entry) {
  switch (entry.slot) {
    case WeightSlot::kEmbedding:
      return w.embedding_VH;
    case WeightSlot::kFinalNorm:
      return w.final_norm_H;
    case WeightSlot::kHead:
      return w.head_VH;
    default:
      return FieldOf(w.layers[entry.layer], entry.slot);
  }
}

// The matrix of a slot and its place in the buffer.
struct SlotTensor {
  const WeightEntry* entry;  // The slot's first entry.
  std::vector<int64_t> shape;
  at::ScalarType dtype;
  int64_t offset = 0;  // In bytes.
};

// Allocates all matrices in one uninitialised buffer. On a CPU, nearly all of
// one large buffer can be in huge pages.
DecoderWeights Allocate(const std::vector<WeightEntry>& entries,
                        const ModelConfig& config,
                        const at::TensorOptions& options, MatrixFormat format) {
  const at::ScalarType dtype = c10::typeMetaToScalarType(options.dtype());
  std::vector<SlotTensor> slots;
  int64_t size = 0;
  for (const WeightEntry& entry : entries) {
    if (entry.first_row > 0) continue;
    SlotTensor slot{.entry = &entry,
                    .shape = entry.part_shape,
                    .dtype = IsWide(entry.slot, config) ? at::kFloat : dtype,
                    .offset = size};
    slot.shape[0] = entry.slot_rows;
    if (format == MatrixFormat::kInt8 && MayBeInt8(entry.slot)) {
      slot.shape[1] = ops::Int8RowStride(slot.shape[1]);
      slot.dtype = at::kChar;
    }
    size += SlotBytes(entry, config,
                      static_cast<int64_t>(c10::elementSize(dtype)), format);
    slots.push_back(std::move(slot));
  }
  const at::Tensor buffer = at::empty({size}, options.dtype(at::kByte));
  if (buffer.is_cpu()) {
    PreferHugePages(absl::MakeSpan(
        static_cast<std::byte*>(buffer.mutable_data_ptr()), buffer.nbytes()));
  }
  DecoderWeights w{.dtype = dtype};
  w.layers.resize(config.num_layers);
  for (const SlotTensor& slot : slots) {
    const int64_t bytes = c10::multiply_integers(slot.shape) *
                          static_cast<int64_t>(c10::elementSize(slot.dtype));
    at::Tensor& field = FieldOf(w, *slot.entry);
    field =
        buffer.narrow(0, slot.offset, bytes).view(slot.dtype).view(slot.shape);
    if (ops::IsInt8(field)) {
      field = ops::Int8WeightIn(field, slot.entry->part_shape[1]);
    }
  }
  if (config.tied_embeddings) w.head_VH = w.embedding_VH;
  return w;
}

// Checks names and shapes of the stored tensors. Callers call this before they
// allocate, because config.json may name absurd sizes.
absl::Status CheckEntries(const weights::Checkpoint& checkpoint,
                          const std::vector<WeightEntry>& entries) {
  for (const WeightEntry& entry : entries) {
    for (const StoredPart& part : PartsOf(PlaceIn(checkpoint, entry))) {
      WEFT_ASSIGN_OR_RETURN(const weights::DiskTensor stored,
                            checkpoint.Find(part.name));
      WEFT_RETURN_IF_ERROR(CheckStored(part.name, part, stored));
    }
  }
  return absl::OkStatus();
}

// Returns the rows of the slot's matrix into which an entry is read.
at::Tensor PlaceOf(DecoderWeights& w, const WeightEntry& entry) {
  return FieldOf(w, entry).narrow(0, entry.first_row, entry.part_shape[0]);
}

// Puts the first rows of each head of q or k in the decoder's order
// (ModelConfig::head_order). A head has `head_rows` rows.
void OrderHeads(const std::vector<int>& head_order, int64_t head_rows,
                const at::Tensor& rows) {
  const at::Tensor order = ops::ToDevice(head_order, rows.device(), at::kLong);
  const at::Tensor heads =
      rows.unflatten(0, {-1, head_rows}).narrow(1, 0, order.numel());
  heads.copy_(heads.index_select(1, order));
}

// Reads the entries into `w`. Then puts the features of heads in order, and if
// config.norms_from_one is true, adds 1 to the norm weights. Shows a progress
// bar.
absl::Status ReadEntries(const weights::Checkpoint& checkpoint,
                         const ModelConfig& config,
                         const std::vector<WeightEntry>& entries,
                         DecoderWeights& w) {
  weights::ReadPlan plan(checkpoint);
  std::vector<PackedEntry> packed;
  for (const WeightEntry& entry : entries) {
    StoredPlace place = PlaceIn(checkpoint, entry);
    if (place.form != StoredForm::kRows) {
      packed.push_back({&entry, std::move(place), PlaceOf(w, entry)});
      continue;
    }
    const at::Tensor destination = PlaceOf(w, entry);
    WEFT_RETURN_IF_ERROR(plan.Add(
        place.name, {place.first_row + entry.part_row, entry.part_column},
        destination, FormatOf(entry, destination)));
  }
  Progress progress(
      "loading weights",
      static_cast<int64_t>(plan.num_bytes()) + PackedBytes(checkpoint, packed),
      "B");
  const auto on_read = [&](int64_t bytes) { progress.Add(bytes); };
  WEFT_RETURN_IF_ERROR(plan.Run(on_read));
  WEFT_RETURN_IF_ERROR(ReadPacked(checkpoint, packed, on_read));
  for (const WeightEntry& entry : entries) {
    if (entry.head_rows > 0 && !config.head_order.empty()) {
      OrderHeads(config.head_order, entry.head_rows, PlaceOf(w, entry));
    }
    if (IsFromOne(entry.slot, config)) FieldOf(w, entry).add_(1);
  }
  return absl::OkStatus();
}

// Checks that a tied head in the checkpoint equals the embedding. Releases of
// transformers differ in which of these two tensors they use.
absl::Status CheckTiedHead(const weights::Checkpoint& checkpoint,
                           const WeightEntry& embedding_entry,
                           const at::Tensor& embedding_VH) {
  const auto head = checkpoint.Find(kHeadName);
  if (absl::IsNotFound(head.status())) return absl::OkStatus();
  if (!head.ok()) return head.status();
  WEFT_ASSIGN_OR_RETURN(const weights::DiskTensor embedding,
                        checkpoint.Find(kEmbeddingName));
  if (head->IsSameAs(embedding)) return absl::OkStatus();
  WEFT_ASSIGN_OR_RETURN(
      const bool same,
      weights::HasValues(checkpoint, kHeadName,
                         {.row = embedding_entry.part_row}, embedding_VH,
                         FormatOf(embedding_entry, embedding_VH)));
  if (same) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "tensor '", kHeadName, "' differs from '", kEmbeddingName,
      "', though tie_word_embeddings says that they are one; remove the tensor "
      "or set the field to false"));
}

// Entries of one slot.
using Slot = absl::Span<const WeightEntry>;

// Fills a slot's whole matrix with random numbers. Each slot has its own random
// stream. So the numbers do not depend on the order of slots or on threads.
void Draw(const WeightEntry& first, uint64_t seed, at::Tensor& matrix_OI) {
  at::Generator generator = at::detail::createCPUGenerator(
      seed * 0x9e3779b97f4a7c15U + static_cast<uint64_t>(first.layer) * 64 +
      static_cast<uint64_t>(first.slot));
  // This bound gives the variance 1 / inputs, so that a product's outputs have
  // the same mean square as its inputs.
  const double bound = std::sqrt(3.0 / static_cast<double>(matrix_OI.size(1)));
  matrix_OI.uniform_(-bound, bound, generator);
}

bool AreOfOneSlot(const WeightEntry& a, const WeightEntry& b) {
  return a.layer == b.layer && a.slot == b.slot;
}

// Removes the entries of the first slot from `entries`, and returns them.
Slot TakeSlot(Slot& entries) {
  size_t end = 1;
  while (end < entries.size() && AreOfOneSlot(entries[0], entries[end])) ++end;
  const Slot slot = entries.first(end);
  entries.remove_prefix(end);
  return slot;
}

// Draws a slot's whole matrix and keeps the rank's part. `part` has the rank's
// entries. `whole` also has the entries of other ranks' experts.
void FillMatrix(Slot whole, Slot part, uint64_t seed, DecoderWeights& w) {
  at::Tensor& field = FieldOf(w, part.front());
  const bool is_int8 = ops::IsInt8(field);
  int64_t rows = 0;
  for (const WeightEntry& entry : whole) rows += entry.shape[0];
  const int64_t columns = whole.front().shape[1];
  if (!is_int8 && field.is_cpu() && field.size(0) == rows &&
      field.size(1) == columns) {
    return Draw(whole.front(), seed, field);
  }
  at::Tensor whole_OI =
      at::empty({rows, columns}, is_int8 ? at::kFloat : field.scalar_type());
  Draw(whole.front(), seed, whole_OI);
  int64_t first_row = 0;
  for (const WeightEntry& of : whole) {
    if (!part.empty() && part.front().name == of.name &&
        part.front().fused.first_row == of.fused.first_row) {
      const WeightEntry& entry = part.front();
      const absl::Status stored = StoreRows(
          entry,
          whole_OI.narrow(0, first_row + entry.part_row, entry.part_shape[0])
              .narrow(1, entry.part_column, entry.part_shape[1]),
          PlaceOf(w, entry));
      TORCH_CHECK(stored.ok(), stored.ToString());
      part.remove_prefix(1);
    }
    first_row += of.shape[0];
  }
}

void FillSlot(Slot whole, Slot part, uint64_t seed, DecoderWeights& w) {
  at::Tensor& field = FieldOf(w, part.front());
  if (IsNorm(part.front().slot)) {
    field.fill_(1);
  } else if (field.dim() == 1) {
    field.zero_();
  } else {
    FillMatrix(whole, part, seed, w);
  }
}

}  // namespace

absl::Status CheckDecoderWeights(const weights::Checkpoint& checkpoint,
                                 const ModelConfig& config) {
  WEFT_RETURN_IF_ERROR(CheckNoOtherTensors(checkpoint, config));
  return CheckEntries(checkpoint, ListWeights(config));
}

absl::StatusOr<DecoderWeights> LoadDecoderWeights(
    const weights::Checkpoint& checkpoint, const ModelConfig& config,
    at::ScalarType dtype, at::Device device, const parallel::Shard& shard,
    MatrixFormat format) {
  // Every rank checks the tensors of all ranks, so that all ranks get the same
  // result.
  WEFT_RETURN_IF_ERROR(CheckDecoderWeights(checkpoint, config));
  const std::vector<WeightEntry> entries = ListWeights(config, shard);
  DecoderWeights w = Allocate(
      entries, config, at::TensorOptions().dtype(dtype).device(device), format);
  WEFT_RETURN_IF_ERROR(ReadEntries(checkpoint, config, entries, w));
  if (config.tied_embeddings) {
    WEFT_RETURN_IF_ERROR(
        CheckTiedHead(checkpoint, entries.front(), w.embedding_VH));
  }
  return w;
}

DecoderWeights MakeDummyWeights(const ModelConfig& config, at::ScalarType dtype,
                                at::Device device, uint64_t seed,
                                const parallel::Shard& shard,
                                MatrixFormat format) {
  const std::vector<WeightEntry> whole = ListWeights(config);
  const std::vector<WeightEntry> entries = ListWeights(config, shard);
  DecoderWeights w = Allocate(
      entries, config, at::TensorOptions().dtype(dtype).device(device), format);
  Progress progress("making weights", static_cast<int64_t>(entries.size()),
                    "tensors");
  Slot left = entries;
  for (Slot rest = whole; !rest.empty();) {
    const Slot slot = TakeSlot(rest);
    if (left.empty() || !AreOfOneSlot(left.front(), slot.front())) continue;
    const Slot part = TakeSlot(left);
    FillSlot(slot, part, seed, w);
    progress.Add(static_cast<int64_t>(part.size()));
  }
  return w;
}

}  // namespace weft::model
