/// Where KV heads of different lengths lie in a flat buffer `[B, S, D]`.
struct Ranges: Equatable {
    /// First slot of each head.
    let starts: [Int]
    /// Slots of each head that are attended to.
    let lengths: [Int]
}

/// The work of an attention launch as integers, in the layout of metal/work.h.
struct Work: Equatable {
    /// Slots of each KV head.
    let lengths: [Int]
    /// First slot of each head in its buffer.
    let starts: [Int]
    /// Which head of the buffer it is.
    let memoryHeads: [Int]
    /// Slots of a block, or nil if heads are not cut.
    let block: Int?

    /// The work on equal heads, or on those in ranges.
    init(lengths: [Int], ranges: Ranges? = nil, block: Int?) {
        (self.lengths, self.block) = (lengths, block)
        let zeros = Array(repeating: 0, count: lengths.count)
        starts = ranges?.starts ?? zeros
        memoryHeads = ranges == nil ? Array(lengths.indices) : zeros
    }

    var slots: Int { lengths.reduce(0, +) }

    /// Blocks of all heads.
    var items: Int { lengths.reduce(0) { $0 + blocks(of: $1) } }

    /// How many blocks a head of so many slots is cut into.
    private func blocks(of length: Int) -> Int {
        block.map { max((length + $0 - 1) / $0, 1) } ?? 1
    }

    /// The launch's integers, its table (a line per block, head after head) and the heads' first
    /// lines.
    func parameters(queries: Int, maskColumns: Int) -> [Int32] {
        var integers = [queries, slots, maskColumns, lengths.count, items, 0, 0, 0]
        var firsts = [0], prefix = 0
        for (head, length) in lengths.enumerated() {
            let step = block ?? length
            for item in 0 ..< blocks(of: length) {
                let offset = item * step
                integers += [head, memoryHeads[head], starts[head], length, prefix]
                integers += [offset, min(step, length - offset), 0]
            }
            firsts.append(firsts[head] + blocks(of: length))
            prefix += length
        }
        return (integers + firsts).map(Int32.init)
    }
}
