#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "kernel_pages.h"
#include "record/black_box.h"
#include "record/recorder.h"

namespace {

constexpr long kPage = 65536;
constexpr int kThreads = 4;
constexpr int kTexts = 200;

// As ddp_lab/protocol/black_box.py reads it.
struct Header {
  std::array<char, 8> magic;
  std::uint64_t pid, slots_at, slots, slot_bytes, texts_at, text_bytes;
};

void read_at(int file, void* to, std::size_t bytes, std::uint64_t at) {
  CHECK(::pread(file, to, bytes, static_cast<off_t>(at)) == static_cast<ssize_t>(bytes));
}

}  // namespace

TEST("where pages have 64 KiB, each part of the file begins at one, and holds what threads have left") {
  const kernel_pages::Of pages(kPage);
  const int file = ::memfd_create("black_box", 0);
  ddp_lab::leave("before there is a file");
  ddp_lab::leave_in(file);
  std::vector<std::jthread> threads;
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([thread] {
      ddp_lab::Event event;
      for (event.step = 0; event.step < kTexts; ++event.step) {
        ddp_lab::recorder().record(event);
        ddp_lab::leave("text " + std::to_string(thread) + " " + std::to_string(event.step));
      }
    });
  }
  threads.clear();
  Header header{};
  read_at(file, &header, sizeof(header), 0);
  CHECK(std::memcmp(header.magic.data(), "DDPLBBX1", 8) == 0 && header.pid == static_cast<std::uint64_t>(::getpid()));
  CHECK(header.slots_at > 0 && header.slots_at % kPage == 0 && header.texts_at % kPage == 0);
  CHECK(header.texts_at >= header.slots_at + header.slots * header.slot_bytes);
  for (std::uint64_t number = 0; number < kThreads * kTexts; ++number) {
    std::uint64_t stamp = 0;
    read_at(file, &stamp, sizeof(stamp), header.slots_at + number * header.slot_bytes);
    CHECK(stamp == 2 * number + 2);
  }
  std::string texts(header.text_bytes, ' ');
  read_at(file, texts.data(), texts.size(), header.texts_at);
  CHECK(std::count(texts.begin(), texts.end(), '\n') == kThreads * kTexts);
  CHECK(texts.find("text 3 199\n") != std::string::npos && texts.find("before") == std::string::npos);
  ::close(file);
}

int main() { return check::run(); }
