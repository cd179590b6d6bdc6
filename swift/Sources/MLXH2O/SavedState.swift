import MLX

/// A saved cache's contents, checked before anything is done with them.
///
/// Whatever a file tells, what is restored from it has shapes that fit together, indices that lie in
/// their buffers, and needs no more memory than a cache of its size does.
struct SavedState {
    let store: SlotStore
    let offset: Int
    let agedFrom: Int
    let remainder: Remainder
    let victims: MLXArray?
    let window: RecentWindow?
    let rowTypes: RowTypes

    // Far above what any model has.
    private static let mostHeads = 1 << 12
    private static let mostBatch = 1 << 12
    // Of a recent window that is larger than what was saved of it.
    private static let mostWindowBytes = 1 << 30

    /// - Throws: ``H2OError/file(_:)`` unless the contents are such as a cache with these settings could have.
    init(
        _ arrays: [String: MLXArray], _ configuration: SettingValue, of settings: CacheSettings
    ) throws {
        guard let runs = configuration["runs"]?.array?.map({ Run($0) }), !runs.contains(nil),
            let offset = configuration["offset"]?.int,
            let reserved = configuration["reserved"]?.int
        else { throw Self.damage("its runs, offset or reserved slots are missing") }
        let slots = arrays.below("slots.")
        var store = SlotStore(runs: runs.map { $0! }, reserved: reserved, fields: slots)
        self.offset = offset
        // Files from before there were turns do not say from where ages count.
        agedFrom = configuration["aged_from"]?.int ?? 0
        guard 0 ... max(offset - 1, 0) ~= agedFrom else {
            throw Self.damage("ages that count from \(agedFrom)")
        }
        let saved = try Self.window(configuration["recent"] ?? .null, of: settings)
        try Self.check(store, offset: offset, saved, of: settings)
        rowTypes = try Self.rowTypes(store, settings.packing)
        try Self.check(settings, rowTypes)
        store = SlotStore(
            runs: store.runs, reserved: reserved,
            fields: try Self.completed(
                slots, settings.packing, store.leading(batch: rowTypes.batch), settings.asides,
                hadLengths: settings.usesValueLengths))
        store.fitPositions(offset)
        self.store = store
        try Self.checkPositions(
            store, before: offset - (saved?.length ?? 0), pins: settings.pins)
        remainder = try Self.remainder(arrays.below("remainder."), rowTypes, settings.remembers)
        victims = arrays["victims"]
        try Self.check(victims, store, rowTypes, count: settings.policy.options.evictEvery)
        guard let saved else {
            window = nil
            return
        }
        let fields = try Self.checked(arrays.below("recent."), of: saved, rowTypes, settings)
        window = try RecentWindow(
            configuration["recent"]!, fields: fields, kept: settings.packing,
            policy: settings.policy)
    }

    private static func damage(_ what: String) -> H2OError {
        .file("this is no state of an H2OKVCache: \(what).")
    }

    /// The recent window's numbers.
    private struct Window {
        let size, length, oldest: Int
    }

    private static func window(_ json: SettingValue, of settings: CacheSettings) throws -> Window? {
        guard settings.packing.recent != nil else {
            guard json == .null else {
                throw damage("it has a recent window that nothing asks for")
            }
            return nil
        }
        guard let size = json["size"]?.int, let length = json["length"]?.int,
            let oldest = json["oldest"]?.int, 1 ... Int(Int32.max) ~= size, 0 ... size ~= length,
            oldest == 0 || (length == size && 0 ..< size ~= oldest)
        else { throw damage("its recent window is not whole") }
        return Window(size: size, length: length, oldest: oldest)
    }

    /// Throw unless the runs cover the heads, lie one after the other, and have the cache's form.
    private static func check(
        _ store: SlotStore, offset: Int, _ window: Window?, of settings: CacheSettings
    ) throws {
        var heads = 0, start = 0
        let sane = 0 ... Int(Int32.max), every = settings.policy.options.evictEvery
        guard sane ~= offset else { throw damage("an offset of \(offset)") }
        for run in store.runs {
            guard run.first == heads, run.last > heads, run.last <= mostHeads else {
                throw damage("its runs do not follow each other")
            }
            guard sane ~= run.budget, sane ~= run.allocated, 0 ... run.budget ~= run.length,
                sane ~= store.reserved, store.reserved + run.length <= run.allocated,
                run.start == start, run.length + (window?.length ?? 0) <= offset
            else { throw damage("heads \(run.range) have slots that cannot be") }
            guard 0 ... every ~= run.victims, run.victims == 0 || run.length == run.budget else {
                throw damage("heads \(run.range) have \(run.victims) victims")
            }
            heads = run.last
            start += run.heads * run.allocated
        }
        let budgets = store.runs.flatMap {
            Array(repeating: $0.budget + (window?.size ?? 0), count: $0.heads)
        }
        try settings.check(budgets: budgets)
        guard settings.filling.allSatisfy({ $0.budgets.count == budgets.count }) else {
            throw damage("slots that follow for other heads")
        }
        guard try PinnedPositions.room(for: settings.pins, in: budgets, settings.policy) == budgets
        else {
            throw damage("heads without room for its pins")
        }
        if let window, try settings.recentWindow(budgets) != window.size {
            throw damage("its recent window is of another policy")
        }
        let rows = store.reserved
        guard
            settings.attends || !settings.remainderAnswers
                ? rows == 0
                : rows == 1
                    || (2 ... plainRows(forBudget: .max)).contains(rows) && rows.isMultiple(of: 2),
            settings.attends || store.runs.count == 1
        else { throw damage("\(rows) plain rows in \(store.runs.count) runs") }
    }

    /// Batch, heads, widths and dtypes of the slots' keys and values, which must be there.
    private static func rowTypes(_ store: SlotStore, _ packing: H2OPacking) throws -> RowTypes {
        guard let batch = store.fields["positions"]?.shape.first, 1 ... mostBatch ~= batch else {
            throw damage("it has no positions")
        }
        let leading = store.leading(batch: batch)
        let keys = try rows("keys", store.fields, packing, leading)
        let values = try rows("values", store.fields, packing, leading)
        return RowTypes(
            batch: batch, heads: store.heads, keyWidth: keys.width, valueWidth: values.width,
            keyDType: keys.dtype, valueDType: values.dtype)
    }

    /// Width and dtype of keys or values `[leading..., width]`, packed or not.
    private static func rows(
        _ name: String, _ fields: Fields, _ packing: H2OPacking, _ leading: [Int]
    ) throws -> (width: Int, dtype: DType) {
        func field(_ name: String, _ dtypes: [DType]) throws -> MLXArray {
            guard let field = fields[name], field.shape.dropLast() == leading[...],
                field.dim(-1) > 0, dtypes.contains(field.dtype)
            else {
                let found = fields[name].map { "\($0.dtype) \($0.shape)" } ?? "nothing"
                throw damage("\(found) for the \(name) of rows \(leading)")
            }
            return field
        }
        guard let bits = packing.bits(name) else {
            let rows = try field(name, RowTypes.dtypes)
            return (rows.dim(-1), rows.dtype)
        }
        let words = try field(name, [.uint32])
        let scales = try field(name + ".scales", RowTypes.dtypes)
        let biases = try field(name + ".biases", [scales.dtype])
        let width = scales.dim(-1) * packing.groupSize
        guard words.dim(-1) * 32 == width * bits, biases.dim(-1) == scales.dim(-1) else {
            throw damage("\(name) whose words, scales and biases do not fit together")
        }
        return (width, scales.dtype)
    }

    /// The frame that the rows of saved arrays are in, if any.
    static func frame(_ arrays: [String: MLXArray]) throws -> H2OFrame? {
        let held = FrameArrays.names.map { arrays[$0] }
        guard let centre = held[0], let scale = held[1] else {
            guard held[0] == nil, held[1] == nil else { throw damage("half of a frame") }
            return nil
        }
        guard centre.ndim == 2, centre.size > 0, centre.shape == scale.shape,
            [centre, scale].allSatisfy({ $0.dtype == .float32 })
        else { throw damage("a frame of the form \(centre.shape) and \(scale.shape)") }
        do {
            return try H2OFrame(FrameArrays(centre: centre, scale: scale))
        } catch {
            throw damage(error.localizedDescription)
        }
    }

    private static func check(_ settings: CacheSettings, _ types: RowTypes) throws {
        do {
            try settings.check(types)
        } catch {
            throw damage(error.localizedDescription)
        }
    }

    /// Fields whose keys and values are checked, with the lengths of values where they are kept, and
    /// only there: older files have none, or have them of packed values too.
    ///
    /// Throws unless what is not keys or values is there, and nothing besides.
    private static func completed(
        _ fields: Fields, _ packing: H2OPacking, _ shape: [Int], _ asides: [String: DType],
        hadLengths: Bool
    ) throws -> Fields {
        var fields = fields
        if asides["value_lengths"] == nil && hadLengths {
            fields["value_lengths"] = nil
        } else if asides["value_lengths"] != nil && fields["value_lengths"] == nil {
            fields["value_lengths"] = valueLengths(packing.rows("values", fields).dense)
        }
        for (name, dtype) in asides {
            let isNarrow = name == "positions" && fields[name]?.dtype == StoredPositions.narrow
            guard let field = fields[name], field.shape == shape, field.dtype == dtype || isNarrow
            else {
                throw damage("its \(name) are missing or of another form")
            }
        }
        let rows = ["keys", "values"].flatMap {
            packing.bits($0) == nil ? [$0] : [$0, $0 + ".scales", $0 + ".biases"]
        }
        guard Set(fields.keys) == Set(asides.keys).union(rows) else {
            throw damage("it holds \(fields.keys.sorted().joined(separator: ", "))")
        }
        return fields
    }

    private static func checkPositions(
        _ store: SlotStore, before end: Int, pins: [Range<Int>]
    ) throws {
        for run in store.runs where run.length > 0 {
            let stored = store.view(run, "positions"), places = PinnedPositions.unmarked(stored)
            guard places.max().item(Int.self) < end else {
                throw damage("positions that were not yet")
            }
            guard arrayEqual(stored, PinnedPositions.stored(places, pins)).item(Bool.self) else {
                throw damage("tokens pinned that no pin names, or the other way round")
            }
        }
    }

    private static func remainder(
        _ arrays: [String: MLXArray], _ types: RowTypes, _ remembers: Bool
    ) throws -> Remainder {
        let empty = Remainder(
            batch: types.batch, heads: types.heads, keyWidth: types.keyWidth,
            valueWidth: types.valueWidth)
        guard remembers else { return empty }
        let held = Remainder.names.compactMap { arrays[$0] }
        guard held.map(\.shape) == empty.arrays.map(\.shape),
            held.allSatisfy({ $0.dtype == .float32 })
        else { throw damage("its remainder is not whole") }
        return Remainder(held)
    }

    private static func check(
        _ victims: MLXArray?, _ store: SlotStore, _ types: RowTypes, count: Int
    ) throws {
        guard let victims else {
            guard store.runs.allSatisfy({ $0.victims == 0 }) else {
                throw damage("its victims are missing")
            }
            return
        }
        guard victims.shape == [types.batch, types.heads, count], victims.dtype == .int32 else {
            throw damage("its victims have the form \(victims.shape)")
        }
        for run in store.runs {
            let own = victims.sliced(run.range, axis: 1)
            guard own.min().item(Int.self) >= 0, own.max().item(Int.self) < max(run.length, 1)
            else { throw damage("victims that are no slots") }
        }
    }

    /// The recent window's fields. Throws unless they are as the cache's own would be.
    private static func checked(
        _ fields: Fields, of window: Window, _ types: RowTypes, _ settings: CacheSettings
    ) throws -> Fields {
        guard let held = fields["keys"]?.shape, held.count == 4,
            window.length ... window.size ~= held[2]
        else { throw damage("its recent window is not whole") }
        let leading = [types.batch, types.heads, held[2]], packing = settings.packing.recent!
        let keys = try rows("keys", fields, packing, leading)
        let values = try rows("values", fields, packing, leading)
        guard keys == (types.keyWidth, types.keyDType),
            values == (types.valueWidth, types.valueDType)
        else { throw damage("its recent window has rows of another form") }
        let fields = try completed(
            fields, packing, leading, settings.asides.filter { $0.key != "positions" },
            hadLengths: settings.usesValueLengths)
        let bytes = fields.values.reduce(0) { $0 + $1.nbytes } / max(held[2], 1)
        guard held[2] == window.size || window.size <= mostWindowBytes / max(bytes, 1) else {
            throw damage("its recent window of \(window.size) tokens is too large")
        }
        return fields
    }
}

extension SlotStore {
    /// `[B, S]` of the runs.
    fileprivate func leading(batch: Int) -> [Int] {
        [batch, runs.reduce(0) { $0 + $1.heads * $1.allocated }]
    }
}

extension CacheSettings {
    /// What is kept of each token beside its key and value.
    var asides: [String: DType] {
        var asides: [String: DType] = ["positions": .int32]
        if policy.needsAttention { asides["scores"] = .float32 }
        if keepsValueLengths { asides["value_lengths"] = .float16 }
        return asides
    }

    /// Whether the policy ranks by the lengths of values.
    var usesValueLengths: Bool { type(of: policy).usesValueLengths }

    /// Whether they are kept beside the rows.
    var keepsValueLengths: Bool { policy.keepsValueLengths(in: packing) }
}

extension [String: MLXArray] {
    /// Arrays whose names begin so, without that beginning.
    fileprivate func below(_ prefix: String) -> Fields {
        reduce(into: [:]) { own, found in
            if found.key.hasPrefix(prefix) {
                own[String(found.key.dropFirst(prefix.count))] = found.value
            }
        }
    }
}
