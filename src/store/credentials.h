// Finds the credentials with which requests to a store are signed, where AWS's
// own programs find them, in this order:
// - AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN
// - the role of a pod: AWS_WEB_IDENTITY_TOKEN_FILE and AWS_ROLE_ARN, which STS
//   exchanges
// - the profile AWS_PROFILE (or "default") of AWS_SHARED_CREDENTIALS_FILE (or
//   ~/.aws/credentials)
// - the role of a container: AWS_CONTAINER_CREDENTIALS_FULL_URI or
//   AWS_CONTAINER_CREDENTIALS_RELATIVE_URI, with the token of
//   AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE or AWS_CONTAINER_AUTHORIZATION_TOKEN
// - the role of the machine (IMDSv2), unless AWS_EC2_METADATA_DISABLED is true
// No message holds a secret.
#ifndef WEFT_SRC_STORE_CREDENTIALS_H_
#define WEFT_SRC_STORE_CREDENTIALS_H_

#include <optional>
#include <string>
#include <string_view>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "src/base/threads/mutex.h"
#include "src/store/http.h"

namespace weft::store {

struct Credentials {
  std::string key_id;
  std::string secret_key;
  std::string session_token;  // May be empty.
  // When they expire, by SteadyNow().
  absl::Time expires = absl::InfiniteFuture();
};

// Returns the credentials of a profile in the text of a credentials file.
// Errors: NOT_FOUND if there is no such profile; INVALID_ARGUMENT if it has no
// keys.
absl::StatusOr<Credentials> ParseProfile(std::string_view text,
                                         const std::string& profile);

// Threads: any.
class CredentialSource {
 public:
  // `http` outlives the source. `region` is that of STS.
  CredentialSource(HttpClient* http, std::string region)
      : http_(http), region_(std::move(region)) {}

  // Returns credentials that have not expired. Renews them some minutes before
  // they expire, and keeps the old ones while that lasts or fails. Errors:
  // PERMISSION_DENIED (there are none, with the places), INVALID_ARGUMENT (a
  // variable or file is malformed), UNAVAILABLE (they cannot be renewed),
  // CANCELLED. Blocks.
  absl::StatusOr<Credentials> Get();

  // Makes the next Get renew these, which the store has called expired.
  void Expire(const std::string& key_id);

 private:
  absl::StatusOr<Credentials> Find();
  absl::StatusOr<Credentials> FromWebIdentity(const std::string& token_file);
  absl::StatusOr<Credentials> FromContainer(const std::string& url);
  absl::StatusOr<Credentials> FromMachine();

  HttpClient* const http_;
  const std::string region_;

  Mutex mu_;
  CondVar renewed_;
  bool renewing_ ABSL_GUARDED_BY(mu_) = false;
  std::optional<Credentials> current_ ABSL_GUARDED_BY(mu_);
  absl::Time renew_at_ ABSL_GUARDED_BY(mu_) = absl::InfinitePast();
};

}  // namespace weft::store

#endif  // WEFT_SRC_STORE_CREDENTIALS_H_
