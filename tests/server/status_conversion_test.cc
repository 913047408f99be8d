#include "server/status_conversion.h"

#include <string>

#include "gtest/gtest.h"

namespace weft {
namespace {

TEST(StatusConversionTest, CodesMapOneToOne) {
  EXPECT_TRUE(ToGrpcStatus(absl::OkStatus()).ok());
  for (int code = 1; code <= 16; ++code) {
    const grpc::Status status =
        ToGrpcStatus(absl::Status(static_cast<absl::StatusCode>(code), "why"));
    EXPECT_EQ(static_cast<int>(status.error_code()), code);
    EXPECT_EQ(status.error_message(), "why");
  }
}

TEST(StatusConversionTest, LongMessagesAreCutAtACharacter) {
  const std::string plain(2000, 'x');
  EXPECT_EQ(ToGrpcStatus(absl::InternalError(plain)).error_message().size(),
            kMaxStatusMessageBytes);
  std::string wide = "x";  // Puts the cut inside a two-byte character.
  for (int i = 0; i < 1000; ++i) wide += "\xC3\xA9";
  const std::string message =
      ToGrpcStatus(absl::InternalError(wide)).error_message();
  EXPECT_EQ(message.size(), kMaxStatusMessageBytes - 1);
  EXPECT_EQ(message.back(), '\xA9');
}

}  // namespace
}  // namespace weft
