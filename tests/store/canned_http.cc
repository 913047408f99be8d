#include "tests/store/canned_http.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace weft::store {
namespace {

void Send(int fd, const std::string& text) {
  for (size_t sent = 0; sent < text.size();) {
    const ssize_t n =
        ::send(fd, text.data() + sent, text.size() - sent, MSG_NOSIGNAL);
    if (n <= 0) return;
    sent += static_cast<size_t>(n);
  }
}

bool Receive(int fd, std::string* text) {
  char block[1 << 14];
  const ssize_t n = ::recv(fd, block, sizeof(block), 0);
  if (n <= 0) return false;
  text->append(block, static_cast<size_t>(n));
  return true;
}

// Returns the bytes of the body that the head announces.
size_t ContentLength(const std::string& head) {
  const std::string lower = absl::AsciiStrToLower(head);
  constexpr std::string_view kName = "\r\ncontent-length: ";
  const size_t at = lower.find(kName);
  size_t size = 0;
  if (at == std::string::npos) return 0;
  const size_t begin = at + kName.size();
  return absl::SimpleAtoi(
             lower.substr(begin, lower.find("\r\n", begin) - begin), &size)
             ? size
             : 0;
}

// Moves the next request out of `buffer`, and reads until it is there.
bool ReadRequest(int fd, std::string* buffer, std::string* request) {
  size_t end;
  while ((end = buffer->find("\r\n\r\n")) == std::string::npos) {
    if (!Receive(fd, buffer)) return false;
  }
  const std::string head = buffer->substr(0, end + 4);
  if (absl::StrContains(head, "100-continue")) {
    Send(fd, "HTTP/1.1 100 Continue\r\n\r\n");
  }
  const size_t total = head.size() + ContentLength(head);
  while (buffer->size() < total) {
    if (!Receive(fd, buffer)) return false;
  }
  *request = buffer->substr(0, total);
  buffer->erase(0, total);
  return true;
}

}  // namespace

std::string Answer(std::string_view status, std::string_view body,
                   std::string_view headers) {
  return absl::StrCat("HTTP/1.1 ", std::string(status),
                      "\r\ncontent-length: ", body.size(), "\r\n",
                      std::string(headers), "\r\n", std::string(body));
}

std::string ErrorAnswer(std::string_view status, std::string_view code,
                        std::string_view message) {
  return Answer(status, absl::StrCat("<Error><Code>", std::string(code),
                                     "</Code><Message>", std::string(message),
                                     "</Message></Error>"));
}

CannedHttp::CannedHttp(Handler handler) : handler_(std::move(handler)) {
  listener_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  ::bind(listener_, generic, size);
  ::listen(listener_, 64);
  ::getsockname(listener_, generic, &size);
  url_ = absl::StrCat("http://127.0.0.1:", ntohs(address.sin_port));
  acceptor_ = std::thread(&CannedHttp::Accept, this);
}

CannedHttp::~CannedHttp() {
  ::shutdown(listener_, SHUT_RDWR);
  acceptor_.join();
  std::vector<std::thread> threads;
  {
    MutexLock lock(&mu_);
    for (const int fd : connections_) ::shutdown(fd, SHUT_RDWR);
    threads.swap(threads_);
  }
  for (std::thread& thread : threads) thread.join();
  MutexLock lock(&mu_);
  for (const int fd : connections_) ::close(fd);
  ::close(listener_);
}

void CannedHttp::Accept() {
  for (int fd;
       (fd = ::accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC)) >= 0;) {
    MutexLock lock(&mu_);
    connections_.push_back(fd);
    threads_.emplace_back(&CannedHttp::Serve, this, fd);
  }
}

void CannedHttp::Serve(int fd) {
  std::string buffer, request;
  while (ReadRequest(fd, &buffer, &request)) {
    std::string answer;
    {
      MutexLock lock(&mu_);
      requests_.push_back(request);
      answer = handler_(request);
    }
    if (answer == kClose) break;
    if (answer != kHang) Send(fd, answer);
  }
  ::shutdown(fd, SHUT_RDWR);
}

std::vector<std::string> CannedHttp::requests() {
  MutexLock lock(&mu_);
  return requests_;
}

size_t CannedHttp::num_connections() {
  MutexLock lock(&mu_);
  return connections_.size();
}

}  // namespace weft::store
