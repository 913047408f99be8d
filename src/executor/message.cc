#include "src/executor/message.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"

namespace weft::executor {
namespace {

// T is Struct or const Struct, so that one list of fields serves for writing
// and for reading.
template <typename T, typename Struct>
concept Is = std::is_same_v<std::remove_const_t<T>, Struct>;

// A value whose bytes are its message.
template <typename T>
concept Plain = std::is_trivially_copyable_v<T>;

// Each Fields calls `each` for every field of a struct.

void Fields(const auto& each, Is<loss::ScoreRows> auto& rows) {
  each(rows.row_offsets);
  each(rows.targets);
  each(rows.temperatures);
  each(rows.filters);
  each(rows.supports.rows);
  each(rows.supports.offsets);
  each(rows.supports.ids);
  each(rows.routing);
}

void Fields(const auto& each, Is<model::PackedBatch> auto& batch) {
  each(batch.tokens_T);
  each(batch.positions_T);
  each(batch.nodes);
  each(batch.routing);
  each(batch.experts_TE);
}

void Fields(const auto& each, Is<TrainPlan> auto& plan) {
  each(plan.batch);
  each(plan.score_index_R);
  each(plan.rows);
  each(plan.distill.batch);
  each(plan.distill.teacher_index_D);
  each(plan.distill.student_index_D);
  each(plan.distill.rows.scores);
  each(plan.distill.rows.teacher_routing);
  each(plan.distill.rows.divergences);
  each(plan.backward);
  each(plan.wants_entropy);
  each(plan.wants_routing);
  each(plan.num_recomputed);
}

void Fields(const auto& each, Is<CachePlan> auto& plan) {
  each(plan.batch);
  each(plan.kv.slots_T);
  each(plan.kv.suffixes);
  each(plan.kv.key_slots_S);
  each(plan.kv.decode);
  each(plan.kv.page_table_TL);
  each(plan.kv.lengths_T);
  each(plan.kv.state_slots_Q);
  each(plan.logit_rows);
  each(plan.logit_routing);
  each(plan.draws);
  each(plan.score_rows);
  each(plan.scores);
}

void Fields(const auto& each, Is<LoraConfig> auto& config) {
  each(config.rank);
  each(config.alpha);
  each(config.target_modules);
  each(config.seed);
  each(config.overrides);
}

void Fields(const auto& each, Is<NewVersion> auto& m) {
  each(m.id);
  each(m.config);
}
void Fields(const auto& each, Is<DropVersions> auto& m) { each(m.ids); }
void Fields(const auto& each, Is<TrainCommand> auto& m) { each(m.plans); }
void Fields(const auto& each, Is<GradientsCommand> auto& m) {
  each(m.gradients_E);
  each(m.trained);
}
void Fields(const auto& each, Is<CacheCommand> auto& m) { each(m.plan); }

// Encodes values as bytes. This is not a file format: the writer and the reader
// must come from the same build and run on the same kind of machine.
class Writer {
 public:
  // `bytes` outlives the writer.
  explicit Writer(std::string* bytes) : bytes_(*bytes) {}

  template <typename T>
  void operator()(const T& value) const {
    Fields(*this, value);
  }
  void operator()(const Plain auto& value) const {
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof(value));
  }
  template <typename T>
  void operator()(const std::vector<T>& values) const {
    (*this)(values.size());
    if constexpr (Plain<T>) {
      bytes_.append(reinterpret_cast<const char*>(values.data()),
                    values.size() * sizeof(T));
    } else {
      for (const T& value : values) (*this)(value);
    }
  }
  void operator()(const lora::LoraSegment& segment) const {
    (*this)(segment.begin);
    (*this)(segment.end);
    (*this)(segment.version->id.value());
  }
  // `tensor` is on the host or undefined.
  void operator()(const at::Tensor& tensor) const {
    (*this)(tensor.defined());
    if (!tensor.defined()) return;
    const at::Tensor values = tensor.contiguous();
    (*this)(values.scalar_type());
    (*this)(values.sizes().vec());
    bytes_.append(static_cast<const char*>(values.const_data_ptr()),
                  values.nbytes());
  }

 private:
  std::string& bytes_;
};

// Reads what a Writer wrote, in the same order. Throws c10::Error when it reads
// past the end.
class Reader {
 public:
  // Both arguments outlive the reader. It removes what it reads from `bytes`.
  Reader(absl::string_view* bytes, const FindVersion& find)
      : bytes_(*bytes), find_(find) {}

  template <typename T>
  void operator()(T& value) const {
    Fields(*this, value);
  }
  template <Plain T>
  void operator()(T& value) const {
    std::memcpy(&value, Take(sizeof(value)), sizeof(value));
  }
  template <typename T>
  void operator()(std::vector<T>& values) const {
    size_t size = 0;
    (*this)(size);
    if constexpr (Plain<T>) {
      TORCH_CHECK(size <= bytes_.size() / sizeof(T), "a message is cut short");
      values.resize(size);
      if (size > 0)
        std::memcpy(values.data(), Take(size * sizeof(T)), size * sizeof(T));
    } else {
      for (size_t i = 0; i < size; ++i) (*this)(values.emplace_back());
    }
  }
  void operator()(lora::LoraSegment& segment) const {
    uint64_t id = 0;
    (*this)(segment.begin);
    (*this)(segment.end);
    (*this)(id);
    segment.version = find_(id);
  }
  void operator()(at::Tensor& tensor) const {
    bool defined = false;
    (*this)(defined);
    tensor = at::Tensor();
    if (!defined) return;
    at::ScalarType dtype = at::kFloat;
    std::vector<int64_t> sizes;
    (*this)(dtype);
    (*this)(sizes);
    tensor = at::empty(sizes, dtype);
    std::memcpy(tensor.mutable_data_ptr(), Take(tensor.nbytes()),
                tensor.nbytes());
  }

 private:
  const char* Take(size_t size) const {
    TORCH_CHECK(size <= bytes_.size(), "a message is cut short");
    const char* data = bytes_.data();
    bytes_.remove_prefix(size);
    return data;
  }

  absl::string_view& bytes_;
  const FindVersion& find_;
};

// Returns an empty message of kind `index`.
template <size_t kIndex = 0>
Message Empty(size_t index) {
  if constexpr (kIndex < std::variant_size_v<Message>) {
    return index == kIndex ? Message(std::in_place_index<kIndex>)
                           : Empty<kIndex + 1>(index);
  } else {
    TORCH_CHECK(false, "a message of unknown kind ", index);
  }
}

}  // namespace

std::string Encode(const Message& message) {
  std::string bytes;
  const Writer out(&bytes);
  out(message.index());
  std::visit(out, message);
  return bytes;
}

Message Decode(absl::string_view bytes, const FindVersion& find) {
  const Reader in(&bytes, find);
  size_t index = 0;
  in(index);
  Message message = Empty(index);
  std::visit(in, message);
  return message;
}

void SendMessage(const Message& message, parallel::Communicator& commands) {
  const std::string bytes = Encode(message);
  at::Tensor size = at::tensor({static_cast<int64_t>(bytes.size())});
  commands.Broadcast(size);
  at::Tensor content =
      at::empty({static_cast<int64_t>(bytes.size())}, at::kByte);
  std::memcpy(content.mutable_data_ptr(), bytes.data(), bytes.size());
  commands.Broadcast(content);
}

std::string ReceiveMessage(parallel::Communicator& commands) {
  at::Tensor size = at::zeros({1}, at::kLong);
  commands.Broadcast(size);
  at::Tensor content = at::empty({size.item<int64_t>()}, at::kByte);
  commands.Broadcast(content);
  return {static_cast<const char*>(content.const_data_ptr()), content.nbytes()};
}

lora::AdapterVersionPtr MakeVersion(const model::Decoder& decoder,
                                    const LoraConfig& config,
                                    at::Tensor compute_N) {
  auto version = std::make_shared<lora::AdapterVersion>();
  version->layout = std::make_shared<lora::AdapterLayout>(
      decoder.local_config().shape(), config);
  version->compute_N = std::move(compute_N);
  return version;
}

}  // namespace weft::executor
