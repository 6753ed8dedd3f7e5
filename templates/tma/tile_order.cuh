// The order in which the CTAs of the forward pass take Q tiles, where a mask makes some rows longer than
// others. The host's tests include this file, too.
#pragma once

namespace flashjit::tma {

/// A Q tile of a head.
struct OrderedTile {
  unsigned head, tile;
};

/// The Q tiles of all heads: each of the grid's `slots` takes one a wave. Heads follow each other,
/// and a head's tiles come from the last to the first. In LPT order (longest processing time first) the
/// tiles of a group come together instead, those at the same position in their heads side by side, the
/// longest (causal) first.
struct TileOrder {
  unsigned tiles_per_head, heads;
  unsigned set_size;        ///< neighbouring tiles of a head that a cluster takes at a time
  unsigned sets_per_group;  ///< a head's, unless LPT order is on

  constexpr TileOrder(unsigned tiles_of_head, unsigned all_heads, unsigned cluster)
      : tiles_per_head(tiles_of_head),
        heads(all_heads),
        set_size(tiles_per_head % cluster == 0 ? cluster : 1),
        sets_per_group(tiles_per_head / set_size) {}

  constexpr unsigned size() const { return tiles_per_head * heads; }

  /// LPT order, in groups of the tiles of two waves, which may begin and end within a head: the second wave
  /// runs backwards, so that every slot gets the same work, and a wave reads few heads, whose K and V stay in
  /// L2. One wave where heads have few tiles. `windows`: K and V of a wave are few anyway, and groups are as
  /// few heads as make whole pairs of waves. ../sm90/NOTES.md#groups-of-heads-that-fit-l2
  constexpr void use_lpt(unsigned slots, bool windows) {
    const unsigned pairs = heads_of_whole_pairs(slots), whole_heads = pairs < heads ? pairs : heads;
    sets_per_group = (windows && whole_heads <= slots / 2 ? whole_heads * tiles_per_head
                      : tiles_per_head < 8                ? slots
                                                          : 2 * slots) /
                     set_size;
  }
  constexpr unsigned heads_of_whole_pairs(unsigned slots) const {
    unsigned divisor = 2 * slots, rest = tiles_per_head;
    while (rest != 0) {
      const unsigned remainder = divisor % rest;
      divisor = rest, rest = remainder;
    }
    return 2 * slots / divisor;
  }

  /// The index of the tile that a slot takes in a wave. Most rows of a window are equally long: which slots
  /// get a shorter one changes with each pair of waves, from one cluster to another.
  static constexpr unsigned index(unsigned slot, unsigned wave, unsigned slots, bool windows) {
    const unsigned rotated = windows ? (slot + wave / 2 * (slots * 2 / 5 / 2 * 2)) % slots : slot;
    return wave * slots + (wave % 2 ? slots - 1 - rotated : rotated);
  }

  /// The tile of an index.
  constexpr OrderedTile at(unsigned index) const {
    const unsigned sets = tiles_per_head / set_size, all = sets * heads, set = index / set_size;
    // The last group takes the few sets that do not fill a group of their own.
    const unsigned groups = (all + sets_per_group / 2) / sets_per_group, last = groups > 1 ? groups - 1 : 0;
    const unsigned group = set / sets_per_group < last ? set / sets_per_group : last;
    const unsigned begin = group * sets_per_group, end = group == last ? all : begin + sets_per_group;
    // The group runs from position `first` of a head to before position `behind` of the head `heads_on`
    // later. So it has as many sets of each position, but one more or one less of those between the two.
    const unsigned head = begin / sets, heads_on = end / sets - head;
    const unsigned first = begin % sets, behind = end % sets;
    const unsigned low = first < behind ? first : behind, high = first < behind ? behind : first;
    const unsigned in_middle = first < behind ? heads_on + 1 : heads_on - 1;
    const unsigned at_low = low * heads_on, at_high = at_low + (high - low) * in_middle;
    const bool is_low = set - begin < at_low, is_high = set - begin >= at_high;
    const unsigned of_position = is_low || is_high ? heads_on : in_middle;
    const unsigned rest = set - begin - (is_low ? 0 : is_high ? at_high : at_low);
    const unsigned position = (is_low ? 0 : is_high ? high : low) + rest / of_position;
    return {head + (position < first) + rest % of_position,
            tiles_per_head - 1 - position * set_size - index % set_size};
  }
};

}  // namespace flashjit::tma
