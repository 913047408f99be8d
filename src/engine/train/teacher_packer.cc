#include "src/engine/train/teacher_packer.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <deque>
#include <utility>

#include "src/engine/decode/sample_routing.h"

namespace weft::engine {
namespace {

// Returns the batch row of a sequence's token.
int64_t RowOf(const std::vector<RowSpan>& spans, int64_t token) {
  for (const RowSpan& span : spans) {
    if (token < span.count) return span.begin + token;
    token -= span.count;
  }
  TORCH_CHECK(false, "a teacher has no row ", token, " beyond its end");
}

class TeacherPacker {
 public:
  explicit TeacherPacker(PackedTrain* packed) : packed_(*packed) {}

  // Notes the pairs of a datum, which is number `index` of the micro-batch.
  void Add(const TrainPiece& piece, size_t index) {
    const Datum& datum = *packed_.data[index].datum;
    std::vector<int64_t> tokens;
    for (int64_t i = 0; i < datum.num_tokens(); ++i) {
      if (IsScored(piece.request->loss, datum, i)) tokens.push_back(i);
    }
    if (tokens.empty()) return;
    Group& group = GroupOf(piece.teacher);
    const std::vector<int32_t>& input = datum.teacher_input();
    const int64_t length = tokens.back() + datum.teacher_offset + 1;
    Datum sequence{.tokens = {input.begin(), input.begin() + length}};
    // Without targets, so that the pass has no score rows.
    sequence.target_offsets.assign(static_cast<size_t>(length) + 1, 0);
    students_.push_back({.index = index,
                         .piece = &piece,
                         .tokens = std::move(tokens),
                         .group = &group,
                         .place = group.request.data.size()});
    group.request.data.push_back(std::move(sequence));
  }

  void Build(bool share_prompts) && {
    if (students_.empty()) return;
    std::vector<TrainPiece> pieces;
    size_t first = 0;
    for (Group& group : groups_) {
      group.first = first;
      first += group.request.data.size();
      pieces.push_back(
          {.request = &group.request,
           .num_data = static_cast<int64_t>(group.request.data.size()),
           .version = group.version});
    }
    PackedTrain teachers = PackTrain(pieces, share_prompts);
    for (const Student& student : students_) {
      AddPairs(student,
               teachers.data[student.group->first + student.place].spans);
    }
    executor::DistillPlan& plan = packed_.distill;
    plan.batch = std::move(teachers.batch);
    plan.teacher_index_D = at::tensor(teacher_rows_, at::kLong);
    plan.student_index_D = at::tensor(student_rows_, at::kLong);
  }

 private:
  // The sequences of one teacher, as a request without targets.
  struct Group {
    lora::AdapterVersionPtr version;
    TrainRequest request;
    size_t first = 0;  // The number of the first sequence, over all groups.
  };
  // A datum with scored tokens, and its teacher's sequence.
  struct Student {
    size_t index = 0;
    const TrainPiece* piece = nullptr;
    std::vector<int64_t> tokens;
    const Group* group = nullptr;
    size_t place = 0;
  };

  Group& GroupOf(const lora::AdapterVersionPtr& version) {
    const auto found = std::ranges::find(groups_, version, &Group::version);
    if (found != groups_.end()) return *found;
    Group& group = groups_.emplace_back();
    group.version = version;
    return group;
  }

  void AddPairs(const Student& student,
                const std::vector<RowSpan>& teacher_spans) {
    PackedDatum& own = packed_.data[student.index];
    const Datum& datum = *own.datum;
    const LossConfig& loss = own.request->loss;
    loss::DistillRows& rows = packed_.distill.rows;
    loss::ScoreRows& scores = rows.scores;
    if (scores.row_offsets.empty()) scores.row_offsets.push_back(0);
    for (const int64_t token : student.tokens) {
      const auto row = static_cast<int64_t>(student_rows_.size());
      student_rows_.push_back(RowOf(own.spans, token));
      teacher_rows_.push_back(
          RowOf(teacher_spans, token + datum.teacher_offset));
      scores.targets.push_back(datum.targets[token]);
      scores.temperatures.push_back(static_cast<float>(loss.temperature));
      scores.row_offsets.push_back(row + 1);
      rows.divergences.push_back(
          {.function = loss.function, .beta = loss.beta});
      AddRows(scores.routing, student.piece->version, row, row + 1);
      AddRows(rows.teacher_routing, student.piece->teacher, row, row + 1);
      // The rows and entries with a teacher follow those without one.
      own.entries.push_back(static_cast<int64_t>(packed_.rows.targets.size()) +
                            row);
      own.rows.push_back(
          static_cast<int64_t>(packed_.rows.temperatures.size()) + row);
    }
  }

  PackedTrain& packed_;
  std::deque<Group> groups_;  // Addresses stay valid.
  std::vector<Student> students_;
  std::vector<int64_t> student_rows_;
  std::vector<int64_t> teacher_rows_;
};

}  // namespace

void PackTeachers(const std::vector<TrainPiece>& pieces, bool share_prompts,
                  PackedTrain& packed) {
  TeacherPacker packer(&packed);
  size_t index = 0;
  for (const TrainPiece& piece : pieces) {
    for (int64_t d = 0; d < piece.num_data; ++d, ++index) {
      if (HasTeacher(piece.request->loss.function)) packer.Add(piece, index);
    }
  }
  std::move(packer).Build(share_prompts);
}

}  // namespace weft::engine
