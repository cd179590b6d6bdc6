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
    var items: Int { lines.count }

    /// A line of the table per block, head after head.
    var lines: [[Int]] {
        var lines: [[Int]] = [], prefix = 0
        for (head, length) in lengths.enumerated() {
            let step = block ?? max(length, 1)
            for offset in stride(from: 0, to: max(length, 1), by: step) {
                let count = min(step, length - offset)
                lines.append([
                    head, memoryHeads[head], starts[head], length, prefix, offset, count, 0,
                ])
            }
            prefix += length
        }
        return lines
    }

    /// The launch's integers, its table and the heads' first lines.
    func parameters(queries: Int, maskColumns: Int) -> [Int32] {
        let lines = lines
        let launch = [queries, slots, maskColumns, lengths.count, lines.count, 0, 0, 0]
        let firsts = lengths.indices.map { head in lines.firstIndex { $0[0] == head }! }
        return (launch + lines.flatMap { $0 } + firsts + [lines.count]).map(Int32.init)
    }
}
