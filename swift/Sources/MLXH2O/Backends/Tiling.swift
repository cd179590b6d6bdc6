import MLX

/// How the attention kernels share out their work: pure functions of sizes, the same in every
/// language (python/mlx_h2o/attention/backends/tiling.py says why).
struct Tiling: Equatable {
    /// Widths that the kernels are written for, in elements.
    static let widths = Set(stride(from: 32, through: 576, by: 32))
    /// Queries of one call.
    static let mostQueries = 8

    private static let simdgroupsByWords = [(12, 32), (30, 16), (76, 12)]
    private static let wordsBesides = 3
    private static let wordsToUnpack = 6
    private static let usualKeys = 16
    private static let stagedBytes = 16384
    private static let blockShare = 0.015

    /// L rounded up to a power of two, so that few variants are compiled.
    let queries: Int
    /// Query rows per simdgroup.
    let rows: Int
    /// Simdgroups with the same keys and different rows.
    let rowGroups: Int
    /// Threadgroups with the same keys and different rows.
    let rowBlocks: Int
    /// Per threadgroup.
    let simdgroups: Int
    /// Keys per simdgroup and step.
    let keys: Int

    /// Simdgroups of a threadgroup that have different keys.
    var splits: Int { simdgroups / rowGroups }

    /// As the attention kernel's template arguments.
    var template: [(String, any KernelTemplateArg)] {
        [
            ("QUERIES", queries), ("ROWS", rows), ("ROW_GROUPS", rowGroups),
            ("SIMDS", simdgroups), ("KEYS", keys),
        ]
    }

    /// Share out the query rows of a KV head.
    ///
    /// - Parameters:
    ///   - keyWidth: D.
    ///   - valueWidth: Dv.
    ///   - group: G, query heads per KV head.
    ///   - queries: L.
    ///   - itemSize: Bytes per element of queries, and of keys and values unless they are packed.
    ///   - packed: Whether keys or values are.
    init(
        keyWidth: Int, valueWidth: Int, group: Int, queries: Int, itemSize: Int,
        packed: Bool = false
    ) {
        var padded = 1
        while padded < queries { padded *= 2 }
        self.queries = padded
        let needed = group * padded
        let words = ceil(keyWidth * itemSize, 32 * 4) + valueWidth / 32 + Self.wordsBesides
        let (mostWords, fewestSimdgroups) = Self.simdgroupsByWords.last!
        let most = min(needed, mostWords / words)
        rowGroups = min(ceil(needed, most), fewestSimdgroups)
        rowBlocks = ceil(needed, most * rowGroups)
        rows = ceil(needed, rowGroups * rowBlocks)
        let held = min(rows * words + (packed ? Self.wordsToUnpack : 0), mostWords)
        let fitting = Self.simdgroupsByWords.first { held <= $0.0 }!.1
        if rowGroups == 1 {
            (simdgroups, keys) = (fitting, Self.usualKeys)
        } else {
            let slots = max(1, Self.stagedBytes / ((keyWidth + valueWidth) * itemSize))
            let splits = min(fitting / rowGroups, slots)
            (simdgroups, keys) = (splits * rowGroups, min(Self.usualKeys, slots / splits))
        }
    }

    /// The slots of a block where two passes pay, or nil for one pass.
    ///
    /// - Parameters:
    ///   - lengths: Slots of each KV head.
    ///   - architecture: The GPU's: in the last letter of "applegpu_g13s" is its size.
    ///   - stored: Bytes of a slot's key and value, if they are packed.
    static func slotsPerBlock(
        lengths: [Int], group: Int, queries: Int, keyWidth: Int, valueWidth: Int, itemSize: Int,
        architecture: String, stored: Int? = nil
    ) -> Int? {
        let longest = lengths.max()!, size = architecture.last ?? " "
        let large = (size == "s" || size == "d") && longest >= 1024
        guard large || (group > 1 && longest >= 4096) else { return nil }
        let tiles = Tiling(
            keyWidth: keyWidth, valueWidth: valueWidth, group: group, queries: queries,
            itemSize: itemSize, packed: stored != nil)
        let rows = group * queries
        let blocks = ceil(simdgroupsOfMLX(longest, rows, size), tiles.splits)
        // Queries are read, partial results and their lse written and read again.
        let extra = rows * (keyWidth * itemSize + 2 * (valueWidth * itemSize + 4))
        let stored = stored ?? (keyWidth + valueWidth) * itemSize
        let fewest = Int(Double(extra) / (blockShare * Double(stored))) + 1
        let step = tiles.splits * tiles.keys
        let slots = ceil(max(ceil(longest, blocks), fewest), step) * step
        return slots < longest ? slots : nil
    }

    /// Over how many simdgroups MLX spreads the keys of a head in its first pass.
    private static func simdgroupsOfMLX(_ slots: Int, _ rows: Int, _ size: Character) -> Int {
        switch size {
        case "s":
            if slots <= 1024 || rows <= 4 { return 64 }
            return [(8192, 128), (32768, 256), (65536, 512)].first { slots <= $0.0 }?.1 ?? 1024
        case "d":
            if rows <= 2 && slots > 8192 { return 256 }
            if rows >= 6 && slots >= 16384 { return slots < 65536 ? 512 : 1024 }
            return 128
        default:
            return rows >= 4 ? 64 : 32
        }
    }
}

private func ceil(_ a: Int, _ b: Int) -> Int { (a + b - 1) / b }
