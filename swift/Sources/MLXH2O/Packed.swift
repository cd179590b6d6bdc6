import MLX

/// Rows in affine quantization, in the format of MLX's `quantized`: w = scale * level + bias, per
/// group of a row's elements.
struct PackedRows {
    /// `[..., rows, width * bits / 32]` uint32.
    let words: MLXArray
    /// `[..., rows, width / groupSize]` in the model's dtype.
    let scales: MLXArray
    /// Likewise.
    let biases: MLXArray
    let bits: Int
    let groupSize: Int

    init(words: MLXArray, scales: MLXArray, biases: MLXArray, bits: Int, groupSize: Int) {
        (self.words, self.scales, self.biases) = (words, scales, biases)
        (self.bits, self.groupSize) = (bits, groupSize)
    }

    /// Rows packed from each group's least to its greatest element.
    ///
    /// MLX's `quantized` makes zero and the larger edge exact and clips the other edge, which costs
    /// twice the perplexity at 4 bits. A group with an infinity or a NaN comes back as NaNs.
    ///
    /// - Parameters:
    ///   - rows: `[..., rows, width]`.
    ///   - bits: Of an element: 2, 3, 4, 5, 6 or 8.
    ///   - groupSize: Divides the width.
    init(packing rows: MLXArray, bits: Int, groupSize: Int) {
        let top = Float((1 << bits) - 1)
        let groups = rows.float32.reshaped(Array(rows.shape.dropLast()) + [-1, groupSize])
        let least = groups.min(axis: -1), greatest = groups.max(axis: -1)
        // The levels count from what is stored, so that rounding to the rows' dtype costs nothing
        // twice.
        let scales = ((greatest - least) / top).asType(rows.dtype)
        let biases = least.asType(rows.dtype)
        let by = scales.float32.column, off = biases.float32.column
        let nearest = minimum(round((groups - off) / by), top)
        // Neither a group without a range nor a NaN is above 0.
        let isLevel = (by .> Float(0)) .&& (nearest .> Float(0))
        let levels = which(isLevel, nearest, Float(0)).asType(.uint32).reshaped(rows.shape)
        self.init(
            words: Self.words(of: levels, bits: bits), scales: scales, biases: biases, bits: bits,
            groupSize: groupSize)
    }

    /// Levels `[..., rows, width]` uint32 as words: a row is one stream of bits, the lowest bit of the
    /// first level first.
    private static func words(of levels: MLXArray, bits: Int) -> MLXArray {
        func counted(_ count: Int) -> MLXArray { MLXArray((0 ..< UInt32(count)).map { $0 }) }
        let stream = (levels.column >> counted(bits)) & MLXArray(UInt32(1))
        let words = stream.reshaped(Array(levels.shape.dropLast()) + [-1, 32]) << counted(32)
        return words.sum(axis: -1)
    }

    /// Of the rows as numbers, `[..., rows, width]`.
    var shape: [Int] { Array(words.shape.dropLast()) + [words.dim(-1) * 32 / bits] }

    /// The rows as float32, without rounding to the model's dtype.
    var dequantizedRows: MLXArray {
        dequantized(
            words, scales: scales.float32, biases: biases.float32, groupSize: groupSize, bits: bits)
    }

    /// The rows in the model's dtype.
    var narrowRows: MLXArray {
        dequantized(words, scales: scales, biases: biases, groupSize: groupSize, bits: bits)
    }

    /// The same rows in another width, from their levels and without a second quantization.
    ///
    /// More bits hold the same levels: every number stays what it is, and nothing that was lost comes
    /// back. Fewer bits keep a level's highest bits, and the bias moves to the middle of the numbers
    /// that now share a level.
    func with(bits: Int) -> PackedRows {
        guard bits != self.bits else { return self }
        var scales = scales, biases = biases
        var levels = dequantized(
            words, scales: MLXArray.ones(scales.shape, dtype: .float32),
            biases: MLXArray.zeros(scales.shape, dtype: .float32), groupSize: groupSize,
            bits: self.bits
        ).asType(.uint32)
        if bits < self.bits {
            let dropped = self.bits - bits, shared = 1 << dropped
            levels = levels >> MLXArray(UInt32(dropped))
            let middle = Float(shared - 1) / 2 * scales.float32
            biases = (biases.float32 + middle).asType(biases.dtype)
            scales = scales * Float(shared)
        }
        return PackedRows(
            words: Self.words(of: levels, bits: bits), scales: scales, biases: biases, bits: bits,
            groupSize: groupSize)
    }

    func sliced(_ range: Range<Int>, axis: Int) -> PackedRows {
        PackedRows(
            words: words.sliced(range, axis: axis), scales: scales.sliced(range, axis: axis),
            biases: biases.sliced(range, axis: axis), bits: bits, groupSize: groupSize)
    }
}

/// Keys or values, dense or packed.
indirect enum Rows {
    case plain(MLXArray)
    case packed(PackedRows)
    /// Rows of different kinds, one after the other, alike in all but their number.
    case joined([Rows])

    /// Of the rows as numbers, `[..., rows, width]`.
    var shape: [Int] {
        switch self {
        case .plain(let rows): return rows.shape
        case .packed(let rows): return rows.shape
        case .joined(let parts):
            var shape = parts[0].shape
            shape[shape.count - 2] = parts.reduce(0) { $0 + $1.shape[shape.count - 2] }
            return shape
        }
    }

    /// Of the rows before they were packed.
    var dtype: DType {
        switch self {
        case .plain(let rows): rows.dtype
        case .packed(let rows): rows.scales.dtype
        case .joined(let parts): parts[0].dtype
        }
    }

    /// The rows as an array of numbers.
    var dense: MLXArray {
        switch self {
        case .plain(let rows): rows
        case .packed(let rows): rows.dequantizedRows
        case .joined(let parts):
            MLXH2O.joined(
                parts.filter { $0.shape[$0.shape.count - 2] > 0 }.map { $0.dense.float32 },
                axis: -2)
        }
    }

    /// The rows as an array in the model's dtype.
    var narrow: MLXArray {
        if case .packed(let rows) = self { rows.narrowRows } else { dense }
    }

    func sliced(_ range: Range<Int>, axis: Int) -> Rows {
        switch self {
        case .plain(let rows): return .plain(rows.sliced(range, axis: axis))
        case .packed(let rows): return .packed(rows.sliced(range, axis: axis))
        case .joined(let parts):
            guard axis == 2 else { return .joined(parts.map { $0.sliced(range, axis: axis) }) }
            var start = 0
            return .joined(
                parts.map { part in
                    let count = part.shape[2], here = range.clamped(to: start ..< start + count)
                    defer { start += count }
                    return part.sliced(here.lowerBound - start ..< here.upperBound - start, axis: 2)
                })
        }
    }
}

/// How a cache stores its keys and values.
public struct H2OPacking: Sendable, Equatable {
    /// Bits of a key's element (2, 3, 4, 5, 6 or 8), or nil for the model's own dtype.
    public let keyBits: Int?
    /// Bits of a value's element, likewise. Keys are the sensitive half: their errors go through the
    /// exponential.
    public let valueBits: Int?
    /// Elements that share a scale and a bias: 32, 64 or 128.
    public let groupSize: Int
    /// Bits of the newest tokens, as many as every head of a layer protects, where they are stored in
    /// another width; 16 for the model's own dtype, or nil: as all others.
    public let recentBits: Int?

    /// Bytes of the smallest key and value: 32 elements in 2 bits each, with a scale and a bias in half
    /// precision.
    static let narrowestRow = 2 * (32 * 2 / 8 + 4)

    /// Rows as they come.
    public static let dense = H2OPacking()

    private init() {
        (keyBits, valueBits, groupSize, recentBits) = (nil, nil, 64, nil)
    }

    /// - Throws: ``H2OError/configuration(_:)`` for bits or group sizes that MLX does not know.
    public init(
        keyBits: Int? = nil, valueBits: Int? = nil, groupSize: Int = 64, recentBits: Int? = nil
    ) throws {
        for (name, bits) in [("keyBits", keyBits), ("valueBits", valueBits)] {
            if let bits, ![2, 3, 4, 5, 6, 8].contains(bits) {
                throw H2OError.configuration(
                    "\(name) must be one of 2, 3, 4, 5, 6, 8, or nil; got \(bits).")
            }
        }
        guard [32, 64, 128].contains(groupSize) else {
            throw H2OError.configuration(
                "groupSize must be one of 32, 64, 128; got \(groupSize).")
        }
        if let recentBits, ![2, 3, 4, 5, 6, 8, 16].contains(recentBits) {
            throw H2OError.configuration(
                "recentBits must be one of 2, 3, 4, 5, 6, 8, 16 (the model's own dtype), or nil; got "
                    + "\(recentBits).")
        }
        if recentBits != nil && keyBits == nil && valueBits == nil {
            throw H2OError.configuration(
                "recentBits needs keyBits or valueBits for the other tokens.")
        }
        self.init(keyBits, valueBits, groupSize, recentBits)
    }

    private init(_ keyBits: Int?, _ valueBits: Int?, _ groupSize: Int, _ recentBits: Int?) {
        (self.keyBits, self.valueBits) = (keyBits, valueBits)
        (self.groupSize, self.recentBits) = (groupSize, recentBits)
    }

    /// How the newest tokens are stored, or nil: as all others.
    var recent: H2OPacking? {
        guard let recentBits else { return nil }
        let bits = recentBits == 16 ? nil : recentBits
        return H2OPacking(
            keyBits == nil ? nil : bits, valueBits == nil ? nil : bits, groupSize, nil)
    }

    /// Whether anything is packed.
    public var packs: Bool { keyBits != nil || valueBits != nil }

    func bits(_ name: String) -> Int? { name == "keys" ? keyBits : valueBits }

    /// What a store keeps of rows `[..., width]` of a field, by name: new ones, which are quantized
    /// now, or packed ones of any width.
    func fields(_ name: String, _ rows: Rows) -> Fields {
        guard let bits = bits(name) else { return [name: rows.dense] }
        if case .packed(let rows) = rows { return parts(name, rows.with(bits: bits)) }
        let rows = rows.dense
        require(
            rows.dim(-1) % groupSize == 0,
            "Rows of width \(rows.dim(-1)) cannot be packed in groups of \(groupSize).")
        return parts(name, PackedRows(packing: rows, bits: bits, groupSize: groupSize))
    }

    /// What packed rows are made of, by the names of a field.
    private func parts(_ name: String, _ rows: PackedRows) -> Fields {
        [name: rows.words, name + ".scales": rows.scales, name + ".biases": rows.biases]
    }

    /// A field's rows out of what a store keeps.
    func rows(_ name: String, _ fields: Fields) -> Rows {
        guard let bits = bits(name) else { return .plain(fields[name]!) }
        return .packed(
            PackedRows(
                words: fields[name]!, scales: fields[name + ".scales"]!,
                biases: fields[name + ".biases"]!, bits: bits, groupSize: groupSize))
    }

    /// Bytes of one row of a field whose dense elements take `elementSize`.
    func rowBytes(_ name: String, width: Int, elementSize: Int) -> Int {
        guard let bits = bits(name) else { return width * elementSize }
        return width * bits / 8 + 2 * elementSize * (width / groupSize)
    }
}
