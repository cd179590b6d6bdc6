import Foundation

/// What each KV head of a model loses at each number of slots, and so how many slots it deserves.
///
/// Heads differ more than policies do: a few copy and recall over long distances, most look at the
/// last tokens. Profiles of version 2 also tell which order of the remainder serves each head better,
/// and frames for packed keys. `mlx_h2o calibrate` writes profiles; the files are the same here.
public struct H2OProfile: Sendable, Equatable {
    /// The file name under which a profile lies beside a model's weights.
    public static let fileName = "mlx_h2o_profile.json"
    /// Below 4 sinks, a few recent tokens and some to choose from, a head is no use.
    public static let smallestBudget = 12

    /// The model it belongs to.
    let model: ModelIdentity
    /// Numbers of slots, ascending.
    public let grid: [Int]
    /// Per bounded layer and KV head the loss at each grid point, at least 0.
    public let losses: [[[Double]]]
    /// How the losses were measured.
    public let method: String
    /// What else a calibration by the very policy tells; nil in files of version 1.
    private(set) var measured: MeasuredHeads?

    // Of a conversation's tokens, the part that says again what was said once: so much do echoes count
    // beside prose (ECHO_PART of Python's profile.py, which says why).
    private static let echoPart = 0.1
    // The part of the loss over echoes that is left where evicted rows come back (RETURNING_PART of
    // Python's profile.py).
    private static let returningPart = 0.25
    /// So much of the loss over echoes is that of heads to which evicted rows come back.
    private static let retrievalPart = 0.85
    // Beyond this part of the calibrated length the curves see too little of what would be evicted,
    // and their shares at this size are kept.
    private static let largestPart = 2

    /// Read a profile.
    ///
    /// - Throws: ``H2OError/profile(_:)``: the file is no profile, or one of another version.
    public init(contentsOf url: URL) throws {
        let json: H2OSettingValue
        do {
            json = try H2OSettingValue(parsing: String(contentsOf: url, encoding: .utf8))
        } catch {
            throw H2OError.profile("Cannot read the profile \(url.path): \(error)")
        }
        try self.init(json)
    }

    /// A profile from its JSON.
    init(_ json: H2OSettingValue) throws {
        guard json["format"]?.string == "mlx-h2o profile" else {
            throw H2OError.profile("This is no mlx-h2o profile.")
        }
        guard let version = json["version"]?.int, 1 ... 2 ~= version else {
            throw H2OError.profile(
                "This profile has version \(json["version"]?.text ?? "unknown"); this reads 1 and 2."
            )
        }
        func integers(_ value: H2OSettingValue?) -> [Int]? {
            value?.array.flatMap { whole($0.map(\.int)) }
        }
        func numbers(_ value: H2OSettingValue?) -> [Double]? {
            value?.array.flatMap { whole($0.map(\.double)) }
        }
        guard let model = json["model"], let type = model["model_type"]?.string,
            let heads = integers(model["kv_heads"]), let widths = integers(model["key_widths"]),
            let vocabulary = model["vocab_size"]?.int, let probe = numbers(model["probe"]),
            let grid = integers(json["grid"]), let method = json["method"]?.string,
            let losses = json["losses"]?.array.flatMap({ layers in
                whole(layers.map { $0.array.flatMap { whole($0.map(numbers)) } })
            })
        else {
            throw H2OError.profile("The profile is damaged.")
        }
        let ascends = zip(grid, grid.dropFirst()).allSatisfy { $0 < $1 }
        let curves = losses.flatMap { $0 }
        guard let first = grid.first, first >= 1, ascends, losses.map(\.count) == heads,
            curves.allSatisfy({ $0.count == grid.count && $0.allSatisfy { $0 >= 0 && $0.isFinite } }
            )
        else {
            throw H2OError.profile(
                "A profile's grid must ascend from at least 1, and every head needs one finite loss "
                    + "of at least 0 per grid point.")
        }
        self.model = ModelIdentity(
            modelType: type, kvHeads: heads, keyWidths: widths, vocabularySize: vocabulary,
            probe: probe)
        (self.grid, self.losses, self.method) = (grid, losses, method)
        measured =
            version == 1
            ? nil
            : try MeasuredHeads(json["measured"] ?? .null, of: self.model, grid: grid.count)
    }

    /// Slots per layer and KV head, `mean` on average, exactly: bought by what each saves.
    ///
    /// - Parameters:
    ///   - mean: Slots per KV head on average.
    ///   - least: Slots that every head must have.
    ///   - length: Of a conversation so far, in which no head can use more; nil: one that goes on.
    /// - Throws: ``H2OError/profile(_:)``: `mean` is below `least`.
    public func budgets(
        mean: Int, least: Int = H2OProfile.smallestBudget, length: Int? = nil
    ) throws -> [[Int]] {
        guard mean >= least else {
            throw H2OError.profile(
                "A budget of \(mean) slots a head is below the \(least) that a head needs with this "
                    + "policy; raise the budget or lower sink and recent.")
        }
        if let length, length <= mean { return losses.map { $0.map { _ in mean } } }
        let longest = grid.last!
        let goesOn = length.map { $0 > longest } ?? true
        let known = goesOn ? min(mean, max(longest / Self.largestPart, least)) : mean
        let curves = wanted(upTo: length ?? longest)
        var slots = curves.sharedOut(mean: known, least: least)
        if known < mean { slots = scaledShares(slots, total: mean * slots.count, least: least) }
        return byLayer(length.map { cappedShares(slots, most: $0) } ?? slots)
    }

    /// Each head's losses in conversations up to a length: with as many slots it loses nothing.
    private func curves(upTo length: Int) -> LossCurves {
        let heads = losses.flatMap { $0 }
        guard length < grid.last! else { return LossCurves(grid: grid, heads: heads) }
        let below = grid.prefix { $0 < length }
        return LossCurves(
            grid: below + [length],
            heads: (measured?.curves(upTo: length) ?? heads).map { $0.prefix(below.count) + [0] })
    }

    /// The same by which slots are bought: with what a head loses over echoes, if that was measured. No
    /// policy knows what will be said again, so of n tokens that came once a head of b slots is taken to
    /// have lost the part 1 - b/n.
    private func wanted(upTo length: Int) -> LossCurves {
        let curves = curves(upTo: length)
        guard let echoes = measured?.echoes else { return curves }
        let tokens = Double(curves.grid.last!)
        let gone = curves.grid.map { Self.echoPart * (1 - Double($0) / tokens) }
        return LossCurves(
            grid: curves.grid,
            heads: zip(curves.heads, echoes).map { curve, echo in
                zip(curve, gone).map { $0 + echo * $1 }
            })
    }

    /// What conversations of so many tokens are expected to lose, summed over the heads, in units of the
    /// profile. Echoes are counted, as where slots are bought. Beyond the calibrated length a head is
    /// taken to need the same share of the tokens.
    ///
    /// - Parameters:
    ///   - mean: Slots per KV head on average.
    ///   - least: Slots that every head must have.
    ///   - bits: Of the rows; nil: not packed.
    ///   - context: Tokens.
    /// - Returns: nil where packing in so many bits was not measured.
    func loss(mean: Int, least: Int, bits: Int?, context: Int) throws -> Double? {
        var (mean, context) = (mean, context)
        let longest = grid.last!
        if context > longest { (mean, context) = (max(mean * longest / context, least), longest) }
        var packed = 0.0
        if let bits {
            guard let losses = measured?.packing[bits] else { return nil }
            packed = losses.reduce(0, +)
        }
        let curves = wanted(upTo: context)
        let slots = try budgets(mean: mean, least: least, length: context).flatMap { $0 }
        return zip(curves.heads, slots).reduce(packed) { $0 + curves.loss($1.0, at: $1.1) }
    }

    /// Elements that share a scale where rows are packed as was measured; nil where none were, or there
    /// are no frames for them.
    var packedGroupSize: Int? {
        measured.flatMap { $0.packing.isEmpty || $0.frames.isEmpty ? nil : $0.groupSize }
    }

    /// Where each layer's heads' remainders had best saturate with these budgets (0 is first order), for
    /// ``H2OKVCache/saturation``; nil where the profile was not made by running this policy.
    func saturations(
        of budgets: [[Int]], policy: any H2OPolicy
    ) -> [[Float]]? {
        guard let measured, measured.policy == policy.name else { return nil }
        return byLayer(measured.saturations(budgets.flatMap { $0 }, grid: grid))
    }

    /// The profile of caches to which evicted rows come back: the loss over echoes counts less, since facts
    /// come back from the file.
    var whereRowsReturn: H2OProfile {
        var profile = self
        profile.measured?.echoes = measured?.echoes?.map { Self.returningPart * $0 }
        return profile
    }

    /// The KV heads of each layer that look far back, for which evicted rows should come back: the fewest
    /// that have most of the loss over what was said once. nil, all of them, where that was not measured.
    var retrievalHeads: [[Bool]]? {
        guard let loss = measured?.echoes else { return nil }
        let falling = loss.indices.sorted { (-loss[$0], $0) < (-loss[$1], $1) }
        let enough = Self.retrievalPart * loss.reduce(0, +)
        var (sum, has) = (0.0, loss.map { _ in false })
        for head in falling {
            has[head] = true
            sum += loss[head]
            if sum >= enough { break }
        }
        return byLayer(has)
    }

    /// Each layer's frame for packed keys in conversations of so many tokens; nil where it has none.
    func frames(context: Int) -> [H2OFrame]? { measured?.frames(context: context) }

    private func byLayer<Element>(_ heads: [Element]) -> [[Element]] {
        var heads = heads.makeIterator()
        return losses.map { $0.map { _ in heads.next()! } }
    }

    /// Throw ``H2OError/profile(_:)`` unless the profile belongs to the model.
    func require(_ other: ModelIdentity) throws {
        if let reason = model.difference(from: other) {
            throw H2OError.profile(
                "This profile was made for another model (\(model.modelType)): \(reason). Make one "
                    + "with `mlx_h2o calibrate --model ...`, or use uniform budgets.")
        }
    }
}

/// All elements, or nil if one of them is.
private func whole<Element>(_ elements: [Element?]) -> [Element]? {
    let some = elements.compactMap { $0 }
    return some.count == elements.count ? some : nil
}
