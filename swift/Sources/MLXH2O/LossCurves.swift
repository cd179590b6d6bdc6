/// What KV heads lose at each number of slots, and slots shared out among heads by that.
///
/// A curve is one head's loss at each point of a grid of slots.
struct LossCurves {
    /// Numbers of slots, ascending.
    let grid: [Int]
    /// Each head's losses at them.
    let heads: [[Double]]

    /// Slots of each head, `mean` on average, exactly.
    ///
    /// Greedy: every head starts at the least; the largest saving of loss per slot, over all steps
    /// up the grid, is bought next, until the slots are spent.
    ///
    /// - Parameters:
    ///   - mean: Slots per head on average, at least `least`.
    ///   - least: Slots that every head must have.
    func sharedOut(mean: Int, least: Int) -> [Int] {
        var slots = Array(repeating: least, count: heads.count)
        var left = (mean - least) * heads.count
        var offers = heads.map { bestStep($0, have: least) }
        while left > 0 {
            var head = 0
            for other in heads.indices.dropFirst()
            where (offers[other].saving, -slots[other]) > (offers[head].saving, -slots[head]) {
                head = other
            }
            guard offers[head].saving > 0 else {
                // Nothing more to gain: the rest is spread evenly.
                let (each, rest) = left.quotientAndRemainder(dividingBy: heads.count)
                for i in slots.indices { slots[i] += each + (i < rest ? 1 : 0) }
                break
            }
            let bought = min(offers[head].target - slots[head], left)
            slots[head] += bought
            left -= bought
            offers[head] = bestStep(heads[head], have: slots[head])
        }
        return slots
    }

    /// The best saving per slot from `have` slots on, and where it leads.
    private func bestStep(_ curve: [Double], have: Int) -> (saving: Double, target: Int) {
        let now = loss(curve, at: have)
        var best: (saving: Double, target: Int)?
        for (slots, loss) in zip(grid, curve) where slots > have {
            let saving = (now - loss) / Double(slots - have)
            if best.map({ saving > $0.saving }) ?? true { best = (saving, slots) }
        }
        return best ?? (0, have)
    }

    /// The loss at any number of slots, linear between grid points.
    func loss(_ curve: [Double], at slots: Int) -> Double {
        if slots <= grid[0] { return curve[0] }
        for i in 1 ..< grid.count where slots <= grid[i] {
            let part = Double(slots - grid[i - 1]) / Double(grid[i] - grid[i - 1])
            return curve[i - 1] + part * (curve[i] - curve[i - 1])
        }
        return curve.last!
    }
}

/// The curve with every rise removed.
func falling(_ curve: [Double]) -> [Double] {
    var curve = curve
    for i in curve.indices.dropLast().reversed() { curve[i] = max(curve[i], curve[i + 1]) }
    return curve
}

/// The same slots in all, none above `most`: what is taken goes to those with the fewest.
///
/// - Parameters:
///   - slots: Of each head; on average at most `most`.
///   - most: Of any head.
func cappedShares(_ slots: [Int], most: Int) -> [Int] {
    var capped = slots.map { min($0, most) }
    var left = slots.reduce(0, +) - capped.reduce(0, +)
    while left > 0 {
        // Level the lowest heads up to the next higher one, or as far as it goes.
        let level = capped.min()!
        let low = capped.indices.filter { capped[$0] == level }
        let above = capped.filter { $0 > level }.min() ?? most
        let room = min((above - level) * low.count, left)
        for (i, head) in low.enumerated() {
            capped[head] += room / low.count + (i < room % low.count ? 1 : 0)
        }
        left -= room
    }
    return capped
}

/// The same shares of another number of slots, exactly; every head has the least.
///
/// - Parameters:
///   - slots: Of each head.
///   - total: To be shared out, at least `least` a head.
///   - least: Slots that every head must have.
func scaledShares(_ slots: [Int], total: Int, least: Int) -> [Int] {
    let factor = Double(total) / Double(slots.reduce(0, +))
    var scaled = slots.map { max(Int(Double($0) * factor), least) }
    // What rounding left over is given, or what the least took is taken back, one slot a turn, the
    // largest head first.
    let order = scaled.indices.sorted { (scaled[$1], $0) < (scaled[$0], $1) }
    let left = total - scaled.reduce(0, +), count = scaled.count
    guard left < 0 else {
        for (turn, head) in order.enumerated() {
            scaled[head] += left / count + (turn < left % count ? 1 : 0)
        }
        return scaled
    }
    let spare = scaled.map { $0 - least }
    func taken(_ turns: Int) -> Int { spare.reduce(0) { $0 + min(turns, $1) } }
    let turns = (Limits.first(in: 1 ... spare.max()!) { taken($0) > -left } ?? spare.max()! + 1) - 1
    for head in scaled.indices { scaled[head] -= min(turns, spare[head]) }
    for head in order.filter({ spare[$0] > turns }).prefix(-left - taken(turns)) {
        scaled[head] -= 1
    }
    return scaled
}
