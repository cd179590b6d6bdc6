import MLX

/// Arrays by field name: "keys", "values", "positions", "scores", and what packs keys and values.
typealias Fields = [String: MLXArray]

/// Neighbouring KV heads with the same budget.
struct Run: Equatable {
    /// First KV head.
    let first: Int
    /// One past the last KV head.
    var last: Int
    /// Slots each head may use.
    let budget: Int
    /// Slots each head uses.
    var length = 0
    /// Slots each head has memory for.
    var allocated = 0
    /// Where the first head's range begins in the flat buffers.
    var start = 0
    /// How many slots are named to be overwritten next and were not yet.
    var victims = 0

    var heads: Int { last - first }
    var range: Range<Int> { first ..< last }
    /// Whether the next token overwrites a slot that is not named yet.
    var needsVictims: Bool { length == budget && victims == 0 }

    /// Group a layer's heads, by budget and slots in use (0 each when not given), into runs.
    static func grouping(_ budgets: [Int], lengths: [Int]? = nil) -> [Run] {
        var runs: [Run] = []
        for (head, budget) in budgets.enumerated() {
            let length = lengths?[head] ?? 0
            if let last = runs.last, last.budget == budget, last.length == length {
                runs[runs.count - 1].last = head + 1
            } else {
                runs.append(Run(first: head, last: head + 1, budget: budget, length: length))
            }
        }
        return runs
    }
}

/// Where the rows of a layer's kept tokens lie.
///
/// Each field is one flat buffer `[B, S, ...]`. KV head k owns a range of slots in it, and the first
/// `length` of them (after `reserved` ones) are in use. Equal budgets are the special case in which
/// the same memory reads `[B, H, N, ...]`. Neighbouring heads with equal budgets form a run, and are
/// worked on together.
struct SlotStore {
    /// Slots allocated at a time until the budget is reached, as mlx-lm's cache grows.
    static let growthStep = 256

    private(set) var runs: [Run]
    /// Slots at the head of each range that hold no token (the remainder's plain rows).
    let reserved: Int
    private(set) var fields: Fields = [:]
    /// Of positions.
    private var dtype = StoredPositions.narrow

    init(budgets: [Int], reserved: Int = 0) {
        runs = Run.grouping(budgets)
        self.reserved = reserved
    }

    init(runs: [Run], reserved: Int, fields: Fields) {
        (self.runs, self.reserved, self.fields) = (runs, reserved, fields)
        dtype = fields["positions"]?.dtype ?? dtype
    }

    var heads: Int { runs.last!.last }

    /// A run's slots in use, `[B, heads, length, ...]`; positions as int32.
    func view(_ run: Run, _ name: String, withReserved: Bool = false) -> MLXArray {
        let field = range(of: fields[name]!, run).sliced(
            (withReserved ? 0 : reserved) ..< reserved + run.length, axis: 2)
        return name == "positions" ? field.asType(StoredPositions.wide) : field
    }

    /// All fields of a run's slots in use.
    func views(_ run: Run) -> Fields {
        Dictionary(uniqueKeysWithValues: fields.keys.map { ($0, view(run, $0)) })
    }

    private func range(of field: MLXArray, _ run: Run) -> MLXArray {
        var field = field
        if runs.count > 1 {
            field = field.sliced(run.start ..< run.start + run.heads * run.allocated, axis: 1)
            if run.heads == 1 {
                return field.expandedDimensions(axis: 1)  // a view, where reshaping copies
            }
        }
        return field.reshaped([field.dim(0), run.heads, run.allocated] + field.shape.dropFirst(2))
    }

    /// Indices into the flat buffers of a run's slots `[..., heads, M]` (0: the first used).
    func flatIndex(_ run: Run, _ slots: MLXArray) -> MLXArray {
        let starts = (0 ..< run.heads).map { Int32(run.start + reserved + run.allocated * $0) }
        return slots + MLXArray(starts).column
    }

    // MARK: how wide positions are

    /// Whether positions are as wide as those of so many tokens.
    func positionsFit(_ tokens: Int) -> Bool { dtype == StoredPositions.dtype(of: tokens) }

    /// Have positions as wide as those of so many tokens.
    mutating func fitPositions(_ tokens: Int) {
        dtype = StoredPositions.dtype(of: tokens)
        if let positions = fields["positions"] { fields["positions"] = positions.asType(dtype) }
    }

    /// Rows of a field as they are kept.
    private func kept(_ name: String, _ rows: MLXArray) -> MLXArray {
        name == "positions" ? rows.asType(dtype) : rows
    }

    // MARK: which slots are in use

    /// Use up the next slot of a run's heads: an unused one (nil), or that of its victims.
    ///
    /// - Parameters:
    ///   - i: The run.
    ///   - named: How many victims are named at once.
    /// - Returns: Which of the victims it is.
    mutating func useNext(_ i: Int, named: Int) -> Int? {
        if runs[i].length < runs[i].budget {
            runs[i].length += 1
            return nil
        }
        runs[i].victims -= 1
        return named - runs[i].victims - 1
    }

    /// Note that victims of a run were named, none of which is used.
    mutating func nameVictims(_ i: Int, _ count: Int) { runs[i].victims = count }

    /// Have every full run choose anew.
    mutating func forgetVictims() {
        for i in runs.indices { runs[i].victims = 0 }
    }

    /// Forget the newest n tokens of every head, where none was evicted.
    mutating func shorten(by n: Int) {
        for i in runs.indices { runs[i].length -= n }
    }

    /// Have as many slots in use, and as many victims left, as there were in these runs.
    mutating func putBack(_ before: [Run]) {
        for (i, run) in before.enumerated() {
            (runs[i].length, runs[i].victims) = (run.length, run.victims)
        }
    }

    // MARK: rows

    /// Make room for `extra` more slots per head, in steps, up to each head's budget.
    ///
    /// - Parameters:
    ///   - extra: Slots that are about to be appended.
    ///   - like: A row per field, `[B, H, M, ...]`, whose widths and dtypes new buffers take.
    mutating func reserve(_ extra: Int, like: Fields) {
        let room = runs.map { run in
            let step = SlotStore.growthStep
            let steps = (run.length + extra + step - 1) / step * step
            return reserved + min(run.budget, steps)
        }
        if !fields.isEmpty && zip(room, runs).allSatisfy({ $0 <= $1.allocated }) { return }
        let allocated = zip(room, runs).map { max($0, $1.allocated) }
        let grown = like.map { name, ofField in
            let row = kept(name, ofField)
            let parts = zip(runs, allocated).map { run, slots in
                let tail = Array(row.shape.dropFirst(3))
                let new = MLXArray.zeros(
                    [row.dim(0), run.heads, slots - run.allocated] + tail, dtype: row.dtype)
                guard run.allocated > 0 else { return new }
                return concatenated([range(of: fields[name]!, run), new], axis: 2)
            }
            return (name, flattened(parts))
        }
        set(Dictionary(uniqueKeysWithValues: grown), allocated)
    }

    /// Store rows `[B, H, L, ...]` by name in unused slots.
    mutating func append(_ rows: Fields) {
        let L = rows["positions"]!.dim(2)
        reserve(L, like: rows)
        let index = runs.map { run in
            let next = broadcast(
                positions(run.length ..< run.length + L), to: [run.heads, L])
            return flatIndex(run, next).reshaped([1, -1])
        }
        put(joined(index, axis: 1), rows.mapValues { $0.flattened(start: 1, end: 2) })
        for i in runs.indices { runs[i].length += L }
    }

    /// Overwrite slots, in place while nothing else holds the buffers.
    ///
    /// - Parameters:
    ///   - index: Flat indices `[B or 1, M]`.
    ///   - rows: Per field `[B, M, ...]`.
    mutating func put(_ index: MLXArray, _ rows: Fields) {
        for (name, row) in rows {
            let field = fields[name]!
            let ones = Array(repeating: 1, count: row.ndim - 2)
            let places = broadcast(index.reshaped(index.shape + ones), to: row.shape)
            fields[name] = putAlong(field, places, values: row.asType(field.dtype), axis: 1)
        }
    }

    /// Rows `[B, M, ...]` of some fields at flat indices `[B or 1, M]`.
    func take(_ index: MLXArray, _ names: some Sequence<String>) -> Fields {
        names.reduce(into: Fields()) { rows, name in
            let field = fields[name]!
            let ones = Array(repeating: 1, count: field.ndim - 2)
            let shape = [field.dim(0), index.dim(1)] + field.shape.dropFirst(2)
            let places = broadcast(index.reshaped(index.shape + ones), to: shape)
            rows[name] = takeAlong(field, places, axis: 1)
        }
    }

    /// Replace all slots: per run its new rows by field, `[B, heads, length, ...]`.
    mutating func replace(_ rows: [Fields]) {
        let lengths = rows.map { $0["positions"]!.dim(2) }
        var replaced: Fields = [:]
        for name in rows[0].keys {
            replaced[name] = flattened(
                rows.map {
                    zeroPadded(kept(name, $0[name]!), axis: 2, before: reserved, after: 0)
                })
        }
        set(replaced, lengths.map { reserved + $0 })
        for i in runs.indices { runs[i].length = lengths[i] }
    }

    /// Give the heads new budgets, and form runs anew; a run may then exceed its budget.
    mutating func regroup(_ budgets: [Int]) {
        guard !fields.isEmpty else {
            runs = Run.grouping(budgets)
            return
        }
        let rows = runs.flatMap { run in
            let views = views(run)
            return (0 ..< run.heads).map { head in
                views.mapValues { $0.sliced(head ..< head + 1, axis: 1) }
            }
        }
        runs = Run.grouping(budgets, lengths: rows.map { $0["positions"]!.dim(2) })
        replace(
            runs.map { run in
                let ofRun = rows[run.range]
                return ofRun.first!.keys.reduce(into: Fields()) { fields, name in
                    fields[name] = joined(ofRun.map { $0[name]! }, axis: 1)
                }
            })
    }

    /// Replace a field's slots in use: per run `[B, heads, length, ...]`.
    mutating func write(_ name: String, _ parts: [MLXArray]) {
        fields[name] = flattened(
            zip(runs, parts).map { run, part in
                zeroPadded(
                    kept(name, part), axis: 2, before: reserved,
                    after: run.allocated - reserved - run.length)
            })
    }

    /// Have keys and values in other dtypes.
    mutating func cast(keys: DType, values: DType, _ packing: H2OPacking) {
        fields.cast(keys: keys, values: values, packing)
    }

    /// Give the buffers away, to be written in place.
    mutating func lend() -> Fields {
        defer { fields = [:] }
        return fields
    }

    /// Have the buffers that were lent, or such as they were.
    mutating func getBack(_ fields: Fields) { self.fields = fields }

    private func flattened(_ parts: [MLXArray]) -> MLXArray {
        joined(
            parts.map { part in
                part.reshaped([part.dim(0), part.dim(1) * part.dim(2)] + part.shape.dropFirst(3))
            }, axis: 1)
    }

    private mutating func set(_ fields: Fields, _ allocated: [Int]) {
        self.fields = fields
        var start = 0
        for (i, slots) in allocated.enumerated() {
            (runs[i].start, runs[i].allocated) = (start, slots)
            start += runs[i].heads * slots
        }
    }
}

extension Fields {
    /// Have keys and values, or their scales and biases, in other dtypes.
    mutating func cast(keys: DType, values: DType, _ packing: H2OPacking) {
        for (name, dtype) in [("keys", keys), ("values", values)] {
            let numbers =
                packing.bits(name) == nil ? [name] : [name + ".scales", name + ".biases"]
            for part in numbers { self[part] = self[part]!.asType(dtype) }
        }
    }
}
