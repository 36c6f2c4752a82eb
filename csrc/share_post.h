// How processes that share a region talk: one datagram socket each, beside the broker's, with descriptors.
// What it is not: it knows no pages; who is asked and what is answered is agent_share.cpp's.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ancillary.h"
#include "fd.h"

namespace pymux {

enum class NoteKind : std::uint32_t {
  join,  // to anybody: who has this segment? answered with the segment's two descriptors
  welcome,
  ask,      // to the carrier: the sender holds these pages, and wants their descriptors
  have,     // with them
  drop,     // to holders: the sender, the carrier, wants these pages out
  dropped,  // to the carrier: not mapped any more
  keep,     // to the carrier: in use
};

struct Note {
  static constexpr std::size_t kPages = Ancillary::kMost;
  NoteKind kind = NoteKind::join;
  std::uint32_t sender = 0, count = 0;  // sender: its place in the segment
  char segment[40] = {};                // its id
  char reply_to[108] = {};              // of join
  std::uint32_t pages[kPages] = {};
  std::uint16_t epochs[kPages] = {};
};

class SharePost {
 public:
  // A socket named after this process in the directory, once those that dead processes left are gone.
  // Throws RegionError.
  explicit SharePost(const std::string& directory);
  ~SharePost();
  SharePost(const SharePost&) = delete;
  SharePost& operator=(const SharePost&) = delete;

  const std::string& path() const { return path_; }
  int fd() const { return fd_.get(); }
  enum class Sent { yes, later, gone };
  Sent send(const std::string& to, const Note& note, const std::vector<Fd>& fds = {}) const;
  bool receive(Note& note, std::vector<Fd>& fds) const;  // false: there is none

  // Asks every process that answers here for a segment; its control and memory descriptors.
  // Throws RegionError when none has it.
  static std::pair<Fd, Fd> find(const std::string& directory, const std::string& segment, double seconds);

 private:
  Fd fd_;
  std::string path_;
};

}  // namespace pymux
