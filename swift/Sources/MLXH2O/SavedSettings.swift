/// Settings as they are saved, in the form that Python's `H2OKVCache.config` has: the part that the engine
/// does not read for itself.
extension CacheSettings {
    /// Settings from their JSON, and the frame of a cache's arrays.
    ///
    /// - Throws: ``H2OError``: something is missing or out of range.
    init(_ json: H2OSettingValue, frame: H2OFrame? = nil) throws {
        guard let policy = json["policy"]?.object, let name = policy["name"]?.string,
            let answers = json["remainder"]?.bool, let attends = json["attending"]?.bool,
            let packing = json["packing"]
        else { throw Self.damage("its settings are not whole") }
        // What only Python has: read as an ordinary cache it would go on as another conversation.
        guard json["sharers"]?.int ?? 1 == 1 else {
            throw H2OError.file("its layers share keys: go on in Python.")
        }
        self.init(
            json["budgets"]?.array?.compactMap(\.int) ?? [],
            policy: try H2OPolicies.make(name, settings: policy.filter { $0.key != "name" }),
            remainder: answers, attends: attends,
            packing: try H2OPacking(
                keyBits: packing["k_bits"]?.int, valueBits: packing["v_bits"]?.int,
                groupSize: packing["group_size"]?.int ?? 64,
                recentBits: packing["recent_bits"]?.int),
            undo: json["undo"]?.int ?? 0, frame: frame,
            saturation: try Self.saturation(json["saturation"]), rope: try Self.rope(json["rope"]),
            filling: try Self.filling(json["filling"]), pins: try Self.pins(json["pins"]))
    }

    private static func damage(_ what: String) -> H2OError {
        .file("this is no state of an H2OKVCache: \(what).")
    }

    /// Slots that follow; files from before there were any do not say.
    private static func filling(_ json: H2OSettingValue?) throws -> [Stage] {
        try (json?.array ?? []).map {
            guard let stage = $0.array, stage.count == 2, let beyond = stage[0].int,
                let budgets = stage[1].array?.map(\.int), !budgets.contains(nil)
            else { throw damage("its filling is no list of stages") }
            return Stage(beyond: beyond, budgets: budgets.map { $0! })
        }
    }

    /// Pins; files from before there were any do not say.
    private static func pins(_ json: H2OSettingValue?) throws -> [Range<Int>] {
        try (json?.array ?? []).map {
            guard let ends = $0.array, ends.count == 2, let first = ends[0].int,
                let end = ends[1].int, first >= 0, first < end
            else { throw damage("its pins are no spans") }
            return first ..< end
        }
    }

    /// The RoPE of keys whose positions roll.
    static func rope(_ json: H2OSettingValue?) throws -> H2ORope? {
        guard let json, json != .null else { return nil }
        guard let dimensions = json["dims"]?.int, let base = json["base"]?.double,
            let scale = json["scale"]?.double, let traditional = json["traditional"]?.bool
        else { throw damage("its rope is not whole") }
        return try H2ORope(
            dimensions: dimensions, base: Float(base), scale: Float(scale), traditional: traditional
        )
    }

    /// Where remainders saturate; files from before heads differed do not say.
    private static func saturation(_ json: H2OSettingValue?) throws -> [Float] {
        guard let json, json != .null else { return [H2ORemainder.saturation] }
        let numbers = (json.array ?? [json]).map(\.double)
        guard !numbers.isEmpty, !numbers.contains(nil) else {
            throw damage("its saturation is no number")
        }
        return numbers.map { Float($0!) }
    }
}
