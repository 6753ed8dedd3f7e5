// The order in which the blocks of the forward pass take Q tiles, where rows differ in length by a mask. The
// tests include it, too.
#pragma once

namespace flashjit::sm90 {

/// A Q tile of a head.
struct OrderedTile {
  unsigned head, tile;
};

/// All heads' Q tiles, of which each of `teams` takes one a round. As they are, a head's follow each other,
/// the last first. `mix` lets those of one place in their heads come together, the longest (causal) first,
/// over so many tiles that all teams get the same, as every other round runs backwards; but no more than
/// that, so that many tiles of a head are computed at a time, and read its K and V together.
struct TileOrder {
  unsigned rows, heads;  ///< tiles of a head, and heads
  unsigned neighbours;   ///< tiles of a head that a cluster of so many blocks takes at a time: a set
  unsigned mixed;        ///< sets: those of a head, if none are

  constexpr TileOrder(unsigned tiles_of_head, unsigned all_heads, unsigned cluster)
      : rows(tiles_of_head),
        heads(all_heads),
        neighbours(rows % cluster == 0 ? cluster : 1),
        mixed(rows / neighbours) {}

  constexpr unsigned size() const { return rows * heads; }

  /// Mixes as few heads as make whole pairs of rounds. Where these are so many that few teams would have a
  /// head together, it is the tiles of one round or two, which begin and end within a head's. `windows`: rows
  /// have no more keys than a window, of which it matters less who reads them together.
  constexpr void mix(unsigned teams, bool windows) {
    unsigned divisor = 2 * teams, rest = rows;
    while (rest != 0) {
      const unsigned remainder = divisor % rest;
      divisor = rest, rest = remainder;
    }
    const unsigned pairs = 2 * teams / divisor, whole_heads = pairs < heads ? pairs : heads;
    mixed = (whole_heads <= teams / (windows ? 2 : 4) ? whole_heads * rows
             : rows < 8                               ? teams
                                                      : 2 * teams) /
            neighbours;
  }

  /// Which tile a team takes in a round. Most of a window's rows are as long as each other: who gets a
  /// shorter one changes with each pair of rounds, from one cluster to another.
  static constexpr unsigned number(unsigned team, unsigned round, unsigned teams, bool windows) {
    const unsigned turned = windows ? (team + round / 2 * (teams * 2 / 5 / 2 * 2)) % teams : team;
    return round * teams + (round % 2 ? teams - 1 - turned : turned);
  }

  constexpr OrderedTile at(unsigned number) const {
    const unsigned sets = rows / neighbours, all = sets * heads, set = number / neighbours;
    // A few last sets are mixed with those before them.
    const unsigned turns = (all + mixed / 2) / mixed, last = turns > 1 ? turns - 1 : 0;
    const unsigned turn = set / mixed < last ? set / mixed : last;
    const unsigned begin = turn * mixed, end = turn == last ? all : begin + mixed;
    // From place `first` of a head on to before `behind` of one that comes `heads_on` later. So there are as
    // many of each place, but of those between the two, in the middle, one more or less.
    const unsigned head = begin / sets, heads_on = end / sets - head;
    const unsigned first = begin % sets, behind = end % sets;
    const unsigned low = first < behind ? first : behind, high = first < behind ? behind : first;
    const unsigned in_middle = first < behind ? heads_on + 1 : heads_on - 1;
    const unsigned at_low = low * heads_on, at_high = at_low + (high - low) * in_middle;
    const bool is_low = set - begin < at_low, is_high = set - begin >= at_high;
    const unsigned of_place = is_low || is_high ? heads_on : in_middle;
    const unsigned rest = set - begin - (is_low ? 0 : is_high ? at_high : at_low);
    const unsigned place = (is_low ? 0 : is_high ? high : low) + rest / of_place;
    return {head + (place < first) + rest % of_place, rows - 1 - place * neighbours - number % neighbours};
  }
};

}  // namespace flashjit::sm90
