import MLX

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

    private static let groupSizes = [32, 64, 128], usualGroupSize = 64

    /// Rows as they come.
    public static let dense = H2OPacking()

    private init() {
        (keyBits, valueBits, groupSize, recentBits) = (nil, nil, Self.usualGroupSize, nil)
    }

    /// Of a model with other widths, caches have another group size where 64 does not divide them.
    ///
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
        guard Self.groupSizes.contains(groupSize) else {
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

    /// Whether its groups divide the widths of rows.
    func fits(_ rows: [RowWidths]) -> Bool {
        rows.allSatisfy {
            (keyBits == nil || $0.key.isMultiple(of: groupSize))
                && (valueBits == nil || $0.value.isMultiple(of: groupSize))
        }
    }

    /// The same bits in groups that divide the widths of rows, where the usual ones do not; nil where
    /// these do, where no others do, or where others were asked for.
    func fitting(_ rows: [RowWidths]) -> H2OPacking? {
        guard groupSize == Self.usualGroupSize, !fits(rows) else { return nil }
        return Self.groupSizes.lazy.map { H2OPacking(keyBits, valueBits, $0, recentBits) }
            .first { $0.fits(rows) }
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

    /// A saved array in the dtypes of rows like these; words and what is no row stay as they are.
    func cast(_ name: String, _ array: MLXArray, _ types: RowTypes) -> MLXArray {
        for (field, dtype) in [("keys", types.keyDType), ("values", types.valueDType)] {
            let names = [field, field + ".scales", field + ".biases"]
            let isRow = ["slots.", "recent."].contains { prefix in
                names.contains { prefix + $0 == name }
            }
            if isRow && array.dtype != .uint32 { return array.asType(dtype) }
        }
        return array
    }

    /// Bytes of one row of a field whose dense elements take `elementSize`.
    func rowBytes(_ name: String, width: Int, elementSize: Int) -> Int {
        guard let bits = bits(name) else { return width * elementSize }
        return width * bits / 8 + 2 * elementSize * (width / groupSize)
    }
}
