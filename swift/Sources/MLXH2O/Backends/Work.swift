/// The work of an attention launch as integers, in the layout of metal/work.h.
struct Work: Equatable {
    /// Slots of each KV head.
    let lengths: [Int]
    /// Slots of a block, or nil if heads are not cut.
    let block: Int?

    var slots: Int { lengths.reduce(0, +) }

    /// A line of the table per block, head after head.
    var lines: [[Int]] {
        var lines: [[Int]] = [], prefix = 0
        for (head, length) in lengths.enumerated() {
            let step = block ?? max(length, 1)
            for offset in stride(from: 0, to: max(length, 1), by: step) {
                let count = min(step, length - offset)
                lines.append([head, head, 0, length, prefix, offset, count, 0])
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
