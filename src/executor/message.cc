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

// Encodes plain values as bytes. This is not a file format: the writer and the
// reader must come from the same build and run on the same kind of machine.
class Writer {
 public:
  template <typename T>
  requires std::is_trivially_copyable_v<T>
  void Put(const T& value) {
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof(value));
  }
  template <typename T>
  requires std::is_trivially_copyable_v<T>
  void Put(const std::vector<T>& values) {
    Put(values.size());
    bytes_.append(reinterpret_cast<const char*>(values.data()),
                  values.size() * sizeof(T));
  }
  // `tensor` is on the host or undefined.
  void Put(const at::Tensor& tensor);

  [[nodiscard]] const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

// Reads what a Writer wrote, in the same order. Throws c10::Error when it reads
// past the end.
class Reader {
 public:
  explicit Reader(absl::string_view bytes) : bytes_(bytes) {}

  template <typename T>
  requires std::is_trivially_copyable_v<T>
  void Get(T& value) {
    std::memcpy(&value, Take(sizeof(value)), sizeof(value));
  }
  template <typename T>
  requires std::is_trivially_copyable_v<T>
  void Get(std::vector<T>& values) {
    size_t size = 0;
    Get(size);
    TORCH_CHECK(size <= bytes_.size() / sizeof(T), "a message is cut short");
    values.resize(size);
    if (size > 0)
      std::memcpy(values.data(), Take(size * sizeof(T)), size * sizeof(T));
  }
  void Get(at::Tensor& tensor);

 private:
  const char* Take(size_t size) {
    TORCH_CHECK(size <= bytes_.size(), "a message is cut short");
    const char* data = bytes_.data();
    bytes_.remove_prefix(size);
    return data;
  }

  absl::string_view bytes_;
};

void Writer::Put(const at::Tensor& tensor) {
  Put(tensor.defined());
  if (!tensor.defined()) return;
  const at::Tensor values = tensor.contiguous();
  Put(values.scalar_type());
  Put(values.sizes().vec());
  bytes_.append(static_cast<const char*>(values.const_data_ptr()),
                values.nbytes());
}

void Reader::Get(at::Tensor& tensor) {
  bool defined = false;
  Get(defined);
  tensor = at::Tensor();
  if (!defined) return;
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> sizes;
  Get(dtype);
  Get(sizes);
  tensor = at::empty(sizes, dtype);
  std::memcpy(tensor.mutable_data_ptr(), Take(tensor.nbytes()),
              tensor.nbytes());
}

void Put(Writer& out, const lora::LoraRouting& routing) {
  out.Put(routing.size());
  for (const lora::LoraSegment& segment : routing) {
    out.Put(segment.begin);
    out.Put(segment.end);
    out.Put(segment.version->id.value());
  }
}

void Get(Reader& in, const FindVersion& find, lora::LoraRouting& routing) {
  size_t size = 0;
  in.Get(size);
  for (size_t i = 0; i < size; ++i) {
    lora::LoraSegment segment;
    uint64_t id = 0;
    in.Get(segment.begin);
    in.Get(segment.end);
    in.Get(id);
    segment.version = find(id);
    routing.push_back(std::move(segment));
  }
}

// Calls `each` for every field. `each` either writes or reads the field, so one
// list of fields serves for writing and for reading.
template <typename Rows, typename Each>
void EachField(Rows& rows, const Each& each) requires
    std::is_same_v<std::remove_const_t<Rows>, loss::ScoreRows> {
  each(rows.row_offsets);
  each(rows.targets);
  each(rows.temperatures);
  each(rows.filters);
  each(rows.supports.rows);
  each(rows.supports.offsets);
  each(rows.supports.ids);
  each(rows.routing);
}

template <typename Batch, typename Each>
void EachField(Batch& batch, const Each& each) requires
    std::is_same_v<std::remove_const_t<Batch>, model::PackedBatch> {
  each(batch.tokens_T);
  each(batch.positions_T);
  each(batch.nodes);
  each(batch.routing);
  each(batch.experts_TE);
}

template <typename Plan, typename Each>
void EachField(Plan& plan, const Each& each) requires
    std::is_same_v<std::remove_const_t<Plan>, TrainPlan> {
  EachField(plan.batch, each);
  each(plan.score_index_R);
  EachField(plan.rows, each);
  EachField(plan.distill.batch, each);
  each(plan.distill.teacher_index_D);
  each(plan.distill.student_index_D);
  EachField(plan.distill.rows.scores, each);
  each(plan.distill.rows.teacher_routing);
  each(plan.distill.rows.divergences);
  each(plan.backward);
  each(plan.wants_entropy);
  each(plan.wants_routing);
  each(plan.num_recomputed);
}

template <typename Plan, typename Each>
void EachField(Plan& plan, const Each& each) requires
    std::is_same_v<std::remove_const_t<Plan>, CachePlan> {
  EachField(plan.batch, each);
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
  EachField(plan.scores, each);
}

template <typename Config, typename Each>
void EachField(Config& config, const Each& each) requires
    std::is_same_v<std::remove_const_t<Config>, LoraConfig> {
  each(config.rank);
  each(config.alpha);
  each(config.target_modules);
  each(config.seed);
  each(config.overrides);
}

// Writes the fields of one kind of message.
class Encoder {
 public:
  explicit Encoder(Writer* out) : out_(*out) {}

  void operator()(const CacheSize& m) const { out_.Put(m); }
  void operator()(const NewVersion& m) const {
    out_.Put(m.id);
    EachField(m.config, field_);
  }
  void operator()(const DropVersions& m) const { out_.Put(m.ids); }
  void operator()(const TrainCommand& m) const {
    out_.Put(m.plans.size());
    for (const TrainPlan& plan : m.plans) EachField(plan, field_);
  }
  void operator()(const GradientsCommand& m) const {
    out_.Put(m.gradients_E.size());
    for (const at::Tensor& gradient_E : m.gradients_E) out_.Put(gradient_E);
    out_.Put(m.trained.size());
    for (const std::vector<uint64_t>& ids : m.trained) out_.Put(ids);
  }
  void operator()(const CacheCommand& m) const { EachField(m.plan, field_); }
  void operator()(const CopyPageCommand& m) const { out_.Put(m.copy); }
  void operator()(const CopyStateCommand& m) const { out_.Put(m.copy); }
  void operator()(const StopCommand& /*m*/) const {}

 private:
  struct PutField {
    Writer& out;
    template <typename T>
    void operator()(const T& value) const {
      out.Put(value);
    }
    void operator()(const lora::LoraRouting& routing) const {
      Put(out, routing);
    }
  };

  Writer& out_;
  PutField field_{out_};
};

// Reads what Encoder wrote.
class Decoder {
 public:
  Decoder(Reader* in, const FindVersion& find) : in_(*in), find_(find) {}

  void operator()(CacheSize& m) const { in_.Get(m); }
  void operator()(NewVersion& m) const {
    in_.Get(m.id);
    EachField(m.config, field_);
  }
  void operator()(DropVersions& m) const { in_.Get(m.ids); }
  void operator()(TrainCommand& m) const {
    m.plans.resize(Size());
    for (TrainPlan& plan : m.plans) EachField(plan, field_);
  }
  void operator()(GradientsCommand& m) const {
    m.gradients_E.resize(Size());
    for (at::Tensor& gradient_E : m.gradients_E) in_.Get(gradient_E);
    m.trained.resize(Size());
    for (std::vector<uint64_t>& ids : m.trained) in_.Get(ids);
  }
  void operator()(CacheCommand& m) const { EachField(m.plan, field_); }
  void operator()(CopyPageCommand& m) const { in_.Get(m.copy); }
  void operator()(CopyStateCommand& m) const { in_.Get(m.copy); }
  void operator()(StopCommand& /*m*/) const {}

 private:
  struct GetField {
    Reader& in;
    const FindVersion& find;
    template <typename T>
    void operator()(T& value) const {
      in.Get(value);
    }
    void operator()(lora::LoraRouting& routing) const {
      Get(in, find, routing);
    }
  };

  [[nodiscard]] size_t Size() const {
    size_t size = 0;
    in_.Get(size);
    return size;
  }

  Reader& in_;
  const FindVersion& find_;
  GetField field_{in_, find_};
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
  Writer out;
  out.Put(message.index());
  std::visit(Encoder(&out), message);
  return out.bytes();
}

Message Decode(absl::string_view bytes, const FindVersion& find) {
  Reader in(bytes);
  size_t index = 0;
  in.Get(index);
  Message message = Empty(index);
  std::visit(Decoder(&in, find), message);
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
