import MLX
import MLXLMCommon

/// Everything that a copy of a cache needs: arrays by name, and the rest as JSON.
extension H2OKVCache {
    /// Every array held, by name, names ascending.
    var namedArrays: [(name: String, array: MLXArray)] {
        guard let store, let remainder else { return [] }
        var named = store.fields.map { (name: "slots.\($0)", array: $1) }
        if remembers {
            named += zip(Remainder.names, remainder.arrays).map { ("remainder.\($0)", $1) }
        }
        if let recent { named += recent.fields.map { ("recent.\($0)", $1) } }
        if let victims { named.append(("victims", victims)) }
        return named.sorted { $0.name < $1.name }
    }

    /// Everything else, in the form that Python's `H2OKVCache.config` has.
    var configuration: SettingValue {
        let optional = { (value: Int?) -> SettingValue in value.map { .int($0) } ?? .null }
        var settings = policy.settings
        settings["name"] = .string(type(of: policy).name)
        var tokens = SettingValue.null, bytes = SettingValue.null, budgets = SettingValue.null
        switch size {
        case .tokens(let count): tokens = .int(count)
        case .bytes(let count): bytes = .int(count)
        case .heads(let slots): budgets = .array(slots.map { .int($0) })
        }
        return .object([
            "policy": .object(settings),
            "remainder": .bool(remainderAnswers),
            "attending": .bool(attends),
            "packing": .object([
                "k_bits": optional(packing.keyBits), "v_bits": optional(packing.valueBits),
                "group_size": .int(packing.groupSize), "recent_bits": optional(packing.recentBits),
            ]),
            "max_size": tokens,
            "max_bytes": bytes,
            "budgets": budgets,
            "offset": .int(offset),
            "own": attended ? .bool(true) : .null,
            "reserved": .int(heldStore?.reserved ?? 0),
            "recent": recent?.json ?? .null,
            "runs": .array(heldStore?.runs.map(\.json) ?? []),
        ])
    }

    /// Arrays in the order in which ``metaState`` names them.
    public var state: [MLXArray] {
        get { namedArrays.map(\.array) }
        set { unnamed = newValue }
    }

    /// The configuration as JSON, then the names of ``state``'s arrays. Set it after them.
    public var metaState: [String] {
        get { [configuration.text] + namedArrays.map(\.name) }
        set {
            let arrays = unnamed ?? []
            unnamed = nil
            guard newValue.count == arrays.count + 1,
                let configuration = try? SettingValue(parsing: newValue[0])
            else {
                preconditionFailure("This is no metaState of an H2OKVCache.")
            }
            do {
                try restore(
                    Dictionary(uniqueKeysWithValues: zip(newValue.dropFirst(), arrays)),
                    configuration)
            } catch {
                preconditionFailure(error.localizedDescription)
            }
        }
    }

    /// A cache from another's arrays and configuration.
    static func restored(_ arrays: [String: MLXArray], _ configuration: SettingValue) throws
        -> H2OKVCache
    {
        guard let policy = configuration["policy"]?.object, let name = policy["name"]?.string,
            let answers = configuration["remainder"]?.bool,
            let attends = configuration["attending"]?.bool, let packing = configuration["packing"]
        else {
            throw H2OError.file("This is no state of an H2OKVCache.")
        }
        let size: Size
        if let tokens = configuration["max_size"]?.int {
            size = .tokens(tokens)
        } else if let bytes = configuration["max_bytes"]?.int {
            size = .bytes(bytes)
        } else {
            size = .heads(configuration["budgets"]?.array?.compactMap(\.int) ?? [])
        }
        let cache = try H2OKVCache(
            size,
            policy: try Policies.make(name, settings: policy.filter { $0.key != "name" }),
            remainder: answers, attends: attends,
            packing: try Packing(
                keyBits: packing["k_bits"]?.int, valueBits: packing["v_bits"]?.int,
                groupSize: packing["group_size"]?.int ?? 64,
                recentBits: packing["recent_bits"]?.int))
        try cache.restore(arrays, configuration)
        return cache
    }

    /// Take over another cache's contents; the settings must be the same.
    private func restore(_ arrays: [String: MLXArray], _ configuration: SettingValue) throws {
        guard let runs = configuration["runs"]?.array?.map({ Run($0) }),
            let offset = configuration["offset"]?.int,
            let reserved = configuration["reserved"]?.int, !runs.contains(nil)
        else {
            throw H2OError.file("This is no state of an H2OKVCache.")
        }
        guard !runs.isEmpty else { return }
        let fields = arrays.reduce(into: Fields()) { fields, entry in
            if entry.key.hasPrefix("slots.") {
                fields[String(entry.key.dropFirst(6))] = entry.value
            }
        }
        let restored = SlotStore(runs: runs.map { $0! }, reserved: reserved, fields: fields)
        let slots = restored.runs.reduce(0) { $0 + $1.heads * $1.allocated }
        let packed = ["keys", "values"].flatMap { name in
            packing.bits(name) == nil ? [name] : [name, "\(name).scales", "\(name).biases"]
        }
        let scores = policy.needsAttention ? ["scores"] : []
        for name in packed + scores + ["positions"] {
            guard let field = fields[name], field.ndim >= 2, field.dim(1) == slots else {
                throw H2OError.file("The field \"\(name)\" does not hold \(slots) slots.")
            }
        }
        let keys = packing.rows("keys", fields), values = packing.rows("values", fields)
        let types = RowTypes(
            batch: keys.shape[0], heads: restored.heads, keyWidth: keys.shape[2],
            valueWidth: values.shape[2], keyDType: keys.dtype, valueDType: values.dtype)
        var statistics = Remainder(
            batch: types.batch, heads: types.heads, keyWidth: types.keyWidth,
            valueWidth: types.valueWidth)
        if remembers {
            let held = Remainder.names.compactMap { arrays["remainder.\($0)"] }
            guard held.count == Remainder.names.count else {
                throw H2OError.file("The remainder is not whole.")
            }
            statistics = Remainder(
                count: held[0], meanKey: held[1], varKey: held[2], meanValue: held[3])
        }
        if let zone = configuration["recent"], zone != .null {
            let fields = arrays.reduce(into: Fields()) { fields, entry in
                if entry.key.hasPrefix("recent.") {
                    fields[String(entry.key.dropFirst(7))] = entry.value
                }
            }
            recent = try RecentZone(
                zone, fields: fields, kept: packing, isScored: policy.needsAttention)
        }
        (self.offset, store, remainder, rowTypes) = (offset, restored, statistics, types)
        victims = arrays["victims"]
        attended = configuration["own"]?.bool ?? false
        fullBudgets = budgets
    }
}

extension Run {
    var json: SettingValue {
        .object([
            "first": .int(first), "last": .int(last), "budget": .int(budget),
            "length": .int(length), "allocated": .int(allocated), "start": .int(start),
            "victims": .int(victims),
        ])
    }

    init?(_ json: SettingValue) {
        guard let first = json["first"]?.int, let last = json["last"]?.int,
            let budget = json["budget"]?.int, let length = json["length"]?.int,
            let allocated = json["allocated"]?.int, let start = json["start"]?.int,
            let victims = json["victims"]?.int
        else { return nil }
        self.init(
            first: first, last: last, budget: budget, length: length, allocated: allocated,
            start: start, victims: victims)
    }
}
