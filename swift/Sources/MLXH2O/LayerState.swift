import MLX

/// Everything that a copy of a layer needs, and what of it can be counted without looking at rows.
extension Layer {
    /// Every array held, by name, names ascending.
    var namedArrays: [(name: String, array: MLXArray)] {
        var named = store.fields.map { (name: "slots.\($0)", array: $1) }
        if settings.remembers {
            named += zip(Remainder.names, remainder.arrays).map { ("remainder.\($0)", $1) }
        }
        if let window { named += window.fields.map { ("recent.\($0)", $1) } }
        if let victims { named.append(("victims", victims)) }
        if let frame { named += zip(FrameArrays.names, frame.arrays).map { ($0, $1) } }
        return named.sorted { $0.name < $1.name }
    }

    /// Arrays that must be evaluated with a step's output, or the graph grows from step to step.
    var sideState: [MLXArray] {
        namedArrays.filter { $0.name != "slots.keys" && $0.name != "slots.values" }.map(\.array)
    }

    /// What the kernels of a fused step wrote last: evaluating it evaluates all steps.
    var decodedState: [MLXArray] { [victims!] + remainder.arrays }

    /// Bytes of what is not lent to kernels.
    var unlentBytes: Int {
        let held = (settings.remembers ? remainder.arrays : []) + (frame?.arrays ?? [])
        return held.reduce(victims!.nbytes) { $0 + $1.nbytes }
    }

    /// Slots of each KV head.
    var budgets: [Int] {
        store.runs.flatMap { Array(repeating: budget(of: $0), count: $0.heads) }
    }

    /// Tokens held by the head that holds most.
    var longest: Int { store.runs.map(\.length).max()! + recentlyHeld }

    /// Tokens lost, mean over heads.
    var meanEvicted: Int {
        store.runs.reduce(0) { $0 + $1.heads * evicted($1) } / store.heads
    }

    /// Positions and scores per batch entry and head, in order of position.
    var held: [[[(position: Int32, score: Float)]]] {
        var held = Array(
            repeating: [[(position: Int32, score: Float)]](), count: rowTypes.batch)
        for run in store.runs {
            let fields = positionsAndScores(attended(run)), length = fields["positions"]!.dim(2)
            let places = PinnedPositions.unmarked(fields["positions"]!).asArray(Int32.self)
            let scores =
                fields["scores"]?.asArray(Float.self) ?? Array(repeating: 0, count: places.count)
            for b in 0 ..< rowTypes.batch {
                for head in 0 ..< run.heads {
                    let first = (b * run.heads + head) * length, range = first ..< first + length
                    held[b].append(
                        zip(places[range], scores[range]).map { (position: $0, score: $1) }
                            .sorted { $0.position < $1.position })
                }
            }
        }
        return held
    }

    /// What is no array, in the form that Python's `H2OKVCache.config` has.
    var json: [String: SettingValue] {
        let json: [String: SettingValue] = [
            "offset": .int(offset),
            "own": settings.attends ? .bool(true) : .null,
            "reserved": .int(store.reserved),
            "recent": window?.json ?? .null,
            "runs": .array(store.runs.map(\.json)),
        ]
        return agedFrom == 0 ? json : json.merging(["aged_from": .int(agedFrom)]) { $1 }
    }
}

extension CacheSettings {
    /// The settings in the form that Python's `H2OKVCache.config` has.
    var json: [String: SettingValue] {
        let optional = { (value: Int?) -> SettingValue in value.map { .int($0) } ?? .null }
        var policySettings = policy.settings
        policySettings["name"] = .string(type(of: policy).name)
        var json: [String: SettingValue] = [
            "policy": .object(policySettings),
            "remainder": .bool(remainderAnswers),
            "attending": .bool(attends),
            "packing": .object([
                "k_bits": optional(packing.keyBits), "v_bits": optional(packing.valueBits),
                "group_size": .int(packing.groupSize), "recent_bits": optional(packing.recentBits),
            ]),
            "max_size": .null, "max_bytes": .null, "budgets": .null,
        ]
        switch size {
        case .tokens(let count): json["max_size"] = .int(count)
        case .bytes(let count): json["max_bytes"] = .int(count)
        case .heads(let slots): json["budgets"] = .array(slots.map { .int($0) })
        }
        if !pins.isEmpty {
            json["pins"] = .array(
                pins.map { .array([.int($0.lowerBound), .int($0.upperBound)]) })
        }
        if undo > 0 { json["undo"] = .int(undo) }
        if !filling.isEmpty {
            json["filling"] = .array(
                filling.map { .array([.int($0.beyond), .array($0.budgets.map { .int($0) })]) })
        }
        if saturation != [Remainder.saturation] {
            let numbers = saturation.map { SettingValue.double(Double($0)) }
            json["saturation"] = Set(saturation).count == 1 ? numbers[0] : .array(numbers)
        }
        return json
    }

    /// Settings from their JSON.
    ///
    /// - Throws: ``H2OError``: something is missing or out of range.
    init(_ json: SettingValue) throws {
        guard let policy = json["policy"]?.object, let name = policy["name"]?.string,
            let answers = json["remainder"]?.bool, let attends = json["attending"]?.bool,
            let packing = json["packing"]
        else {
            throw H2OError.file("this is no state of an H2OKVCache.")
        }
        // What only Python has: read as an ordinary cache it would go on as another conversation.
        guard (json["rope"] ?? .null) == .null, json["sharers"]?.int ?? 1 == 1 else {
            throw H2OError.file(
                "its layers share keys, or see them at positions without gaps: go on in Python.")
        }
        try self.init(
            Self.size(json),
            policy: try Policies.make(name, settings: policy.filter { $0.key != "name" }),
            remainder: answers, attends: attends,
            packing: try H2OPacking(
                keyBits: packing["k_bits"]?.int, valueBits: packing["v_bits"]?.int,
                groupSize: packing["group_size"]?.int ?? 64,
                recentBits: packing["recent_bits"]?.int),
            undo: json["undo"]?.int ?? 0, saturation: try Self.saturation(json["saturation"]))
        self = try with(filling: Self.filling(json["filling"])).with(pins: Self.pins(json["pins"]))
    }

    /// The same settings with the size, the slots that follow, and the pins of a JSON.
    func sized(as json: SettingValue) throws -> CacheSettings {
        try with(
            size: Self.size(json), filling: Self.filling(json["filling"]),
            pins: Self.pins(json["pins"]))
    }

    private static func size(_ json: SettingValue) -> H2OKVCache.Size {
        if let tokens = json["max_size"]?.int { return .tokens(tokens) }
        if let bytes = json["max_bytes"]?.int { return .bytes(bytes) }
        return .heads(json["budgets"]?.array?.compactMap(\.int) ?? [])
    }

    /// Slots that follow; files from before there were any do not say.
    private static func filling(_ json: SettingValue?) throws -> [Stage] {
        try (json?.array ?? []).map {
            guard let stage = $0.array, stage.count == 2, let beyond = stage[0].int,
                let budgets = stage[1].array?.map(\.int), !budgets.contains(nil)
            else {
                throw H2OError.file(
                    "this is no state of an H2OKVCache: its filling is no list of stages.")
            }
            return Stage(beyond: beyond, budgets: budgets.map { $0! })
        }
    }

    /// Pins; files from before there were any do not say.
    private static func pins(_ json: SettingValue?) throws -> [Range<Int>] {
        try (json?.array ?? []).map {
            guard let ends = $0.array, ends.count == 2, let first = ends[0].int,
                let end = ends[1].int, first >= 0, first < end
            else {
                throw H2OError.file("this is no state of an H2OKVCache: its pins are no spans.")
            }
            return first ..< end
        }
    }

    /// Where remainders saturate; files from before heads differed do not say.
    private static func saturation(_ json: SettingValue?) throws -> [Float] {
        guard let json, json != .null else { return [Remainder.saturation] }
        let numbers = (json.array ?? [json]).map(\.double)
        guard !numbers.contains(nil) else {
            throw H2OError.file("this is no state of an H2OKVCache: its saturation is no number.")
        }
        return numbers.map { Float($0!) }
    }
}

extension Core {
    /// Every array of the layer, by name, names ascending; before the first rows only the frame.
    mutating func namedArrays() -> [(name: String, array: MLXArray)] {
        if let layer = layerAtRest() { return layer.namedArrays }
        let frame = settings.frame.map { FrameArrays($0).arrays } ?? []
        return zip(FrameArrays.names, frame).map { ($0, $1) }
    }

    /// Everything but arrays, in the form that Python's `H2OKVCache.config` has.
    var configuration: SettingValue {
        let none: [String: SettingValue] = [
            "offset": .int(0), "own": .null, "reserved": .int(0),
            "recent": .null,
            "runs": .array([]),
        ]
        return .object(settings.json.merging(layer?.json ?? none) { $1 })
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
