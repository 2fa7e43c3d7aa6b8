#include "train/gathered_state.h"

#include <nlohmann/json.hpp>

namespace tessera::train {
namespace {

bool is_whole(const Piece& p) { return p.first_row == 0 && p.view.shape() == p.whole; }

// Room for a whole tensor, made at its first piece.
View room_for(const Piece& p, std::map<std::string, std::vector<std::byte>>& made,
              std::vector<ckpt::TensorRef>& tensors) {
  const auto [entry, added] = made.try_emplace(p.name);
  if (added) entry->second.resize(static_cast<size_t>(p.whole.elements() * bytes_of(p.view.dtype())));
  const View whole(entry->second.data(), p.view.dtype(), p.whole);
  if (added) tensors.push_back({p.name, whole});
  return whole;
}
View place_in(const View& whole, const Piece& p) {
  if (is_whole(p)) return whole;
  const View rows = whole.row_range(p.first_row, p.view.rows());
  return rows.shape() == p.view.shape() ? rows : rows.column_range(p.first_column, p.view.dim(1));
}

// What a piece is, for a process that does not hold it.
nlohmann::json describe(const Piece& p) {
  const auto extents = [](const Shape& s) { return std::vector<int64_t>(s.begin(), s.end()); };
  return {p.name,        extents(p.whole), p.first_row, extents(p.view.shape()), static_cast<int>(p.view.dtype()),
          p.first_column};
}
Piece parse(const nlohmann::json& j) {
  const auto shape = [](const nlohmann::json& extents) { return Shape(extents.get<std::vector<int64_t>>()); };
  return {.name = j.at(0),
          .whole = shape(j.at(1)),
          .first_row = j.at(2),
          .view = View(nullptr, DType(j.at(4).get<int>()), shape(j.at(3))),
          .first_column = j.at(5)};
}

void receive(dist::Communicator& world, int from, const View& place) {
  if (place.contiguous()) return world.send_receive(View(), from, place, from);
  std::vector<std::byte> bytes(static_cast<size_t>(place.bytes()));
  const View arrived(bytes.data(), place.dtype(), place.shape());
  world.send_receive(View(), from, arrived, from);
  copy(arrived, place);
}

}  // namespace

GatheredState::GatheredState(const std::vector<Piece>& pieces, dist::Communicator* world) {
  std::vector<const Piece*> mine;
  nlohmann::json descriptions = nlohmann::json::array();
  for (const Piece& p : pieces) {
    if (!p.saved) continue;
    mine.push_back(&p);
    if (world != nullptr) descriptions.push_back(describe(p));
  }
  const bool leads = world == nullptr || world->rank() == 0;
  for (const Piece* p : mine) {
    if (leads && is_whole(*p)) {
      tensors_.push_back({p->name, copies_.emplace_back(p->view).view()});
      elements_[p->name] += p->view.elements();
    } else if (leads) {
      copy(p->view, part_of(*p));
    }
  }
  if (world == nullptr) return;
  const std::vector<std::string> of_all = world->all_gather(descriptions.dump());
  if (!leads) {
    for (const Piece* p : mine) world->send_receive(HostCopy(p->view).view(), 0, View(), 0);
    return;
  }
  for (int rank = 1; rank < world->size(); ++rank) {
    for (const nlohmann::json& j : nlohmann::json::parse(of_all[static_cast<size_t>(rank)])) {
      receive(*world, rank, part_of(parse(j)));
    }
  }
  check_complete();
}

View GatheredState::part_of(const Piece& p) {
  elements_[p.name] += p.view.elements();
  return place_in(room_for(p, made_, tensors_), p);
}

void GatheredState::check_complete() const {
  for (const ckpt::TensorRef& t : tensors_) {
    TESSERA_CHECK(elements_.at(t.name) == t.view.elements(), "{}: {} elements of {} are there", t.name,
                  elements_.at(t.name), t.view.elements());
  }
}

StagedState::StagedState(const std::vector<Piece>& pieces) {
  for (const Piece& p : pieces) {
    if (is_whole(p)) {
      tensors_.push_back({p.name, copies_.emplace_back(p.view).view()});
    } else {
      room_for(p, made_, tensors_);
      pieces_.push_back(p);
    }
  }
}

void StagedState::put_back() const {
  for (const HostCopy& c : copies_) c.put_back();
  for (const Piece& p : pieces_) {
    const View whole(const_cast<std::byte*>(made_.at(p.name).data()), p.view.dtype(), p.whole);
    copy(place_in(whole, p), p.view);
  }
}

}  // namespace tessera::train
