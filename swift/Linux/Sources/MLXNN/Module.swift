import Foundation
import MLX

public typealias ModuleParameters = NestedDictionary<String, MLXArray>
public typealias ModuleChildren = NestedDictionary<String, Module>
public typealias ModuleItems = NestedDictionary<String, ModuleValue>
public typealias ModuleItem = NestedItem<String, ModuleValue>

/// What a property of a module holds.
public enum ModuleValue {
    case none
    case parameters(MLXArray)
    case module(Module)
    case other(Any)
}

/// A layer: its stored properties that are arrays are its parameters, those that are modules its
/// children.
open class Module {
    public init() {}

    /// The stored properties by name, down to this class.
    open func items() -> ModuleItems {
        var items = ModuleItems()
        for (name, value) in properties() { items[name] = item(value) }
        return items
    }

    /// All arrays but those whose names begin with an underscore.
    open func parameters() -> ModuleParameters {
        let values = items().collected {
            switch $0 {
            case .parameters(let array): .value(array)
            case .module(let module): module.parameters().asItem()
            case .none, .other: .none
            }
        }
        return ModuleParameters(values: values.filter { !$0.key.hasPrefix("_") })
    }

    open func children() -> ModuleChildren {
        ModuleChildren(
            values: items().collected {
                if case .module(let module) = $0 { .value(module) } else { .none }
            })
    }

    /// The modules without children of their own.
    open func leafModules() -> ModuleChildren {
        ModuleChildren(
            values: items().collected {
                guard case .module(let module) = $0 else { return .none }
                let inner = module.leafModules()
                return inner.isEmpty ? .value(module) : inner.asItem()
            })
    }

    /// This module and all below it.
    open func modules() -> [Module] { namedModules().map(\.1) }

    open func namedModules() -> [(String, Module)] {
        [("", self)]
            + children().flattened().flatMap { name, child in
                child.namedModules().map { ($0.0.isEmpty ? name : "\(name).\($0.0)", $0.1) }
            }
    }

    public struct VerifyUpdate: OptionSet, Sendable {
        public let rawValue: Int
        public init(rawValue: Int) { self.rawValue = rawValue }

        public static let noUnusedKeys = VerifyUpdate(rawValue: 1)
        public static let allModelKeysSet = VerifyUpdate(rawValue: 2)
        public static let shapeMismatch = VerifyUpdate(rawValue: 4)
        public static let all = VerifyUpdate(rawValue: -1)
        public static let none = VerifyUpdate([])
    }

    @discardableResult
    public func update(parameters: ModuleParameters) -> Self {
        try! update(parameters: parameters, verify: .none)
    }

    /// Gives parameters new values, in place.
    @discardableResult
    open func update(
        parameters: ModuleParameters, verify: VerifyUpdate, path: [String] = [],
        modulePath: [String] = []
    ) throws -> Self {
        let own = self.parameters().flattened()
        let modules = modulePath + ["\(type(of: self))"]
        var given = Dictionary(uniqueKeysWithValues: parameters.flattened())
        for (name, parameter) in own {
            let path = path + [name]
            guard let value = given.removeValue(forKey: name) else {
                if verify.contains(.allModelKeysSet) {
                    throw UpdateError.keyNotFound(path: path, modules: modules)
                }
                continue
            }
            if verify.contains(.shapeMismatch) && parameter.shape != value.shape {
                throw UpdateError.mismatchedSize(
                    path: path, modules: modules, expectedShape: parameter.shape,
                    actualShape: value.shape)
            }
            parameter._updateInternal(value)
        }
        if verify.contains(.noUnusedKeys) && !given.isEmpty {
            throw UpdateError.unhandledKeys(
                path: path, modules: modules, keys: given.keys.sorted())
        }
        return self
    }

    @discardableResult
    public func update(modules: ModuleChildren) -> Self {
        try! update(modules: modules, verify: .none)
    }

    /// Puts other modules in the place of children, which must be `@ModuleInfo`.
    @discardableResult
    open func update(
        modules: ModuleChildren, verify: VerifyUpdate, path: [String] = [],
        modulePath: [String] = []
    ) throws -> Self {
        let named = Dictionary(
            properties().map { ($0.name, $0.value) }, uniquingKeysWith: { first, _ in first })
        for name in modules.keys {
            try replace(named[name] as Any, by: modules[name]!, name)
        }
        return self
    }

    private func replace(
        _ property: Any, by item: NestedItem<String, Module>, _ name: String
    ) throws {
        switch (property, item) {
        case (_, .none): break
        case (let info as ModuleProperty, .value(let module)):
            try info.set(module)
        case (let info as ModuleProperty, _):
            try replace(info.current as Any, by: item, name)
        case (let module as Module, .dictionary(let inner)):
            try module.update(modules: ModuleChildren(values: inner), verify: .none)
        case (let modules as [Module], .array(let inner)):
            for (module, item) in zip(modules, inner) { try replace(module, by: item, name) }
        default:
            throw UpdateError.needModuleInfo("\(type(of: self)).\(name) must be @ModuleInfo")
        }
    }

    private func properties() -> [(name: String, value: Any)] {
        var found: [(name: String, value: Any)] = []
        var mirror: Mirror? = Mirror(reflecting: self)
        while let current = mirror, current.subjectType != Module.self {
            for child in current.children {
                guard let label = child.label else { continue }
                if let info = child.value as? NamedProperty {
                    // The wrapper of `name` is stored as `_name`.
                    found.append((info.key ?? String(label.dropFirst()), child.value))
                } else {
                    found.append((label, child.value))
                }
            }
            mirror = current.superclassMirror
        }
        return found
    }
}

extension Module: Updatable, Evaluatable {
    public func innerState() -> [MLXArray] { parameters().flattenedValues() }
}

/// A layer of one argument.
public protocol UnaryLayer: Module {
    func callAsFunction(_ x: MLXArray) -> MLXArray
}

public enum UpdateError: Error {
    case keyNotFound(path: [String], modules: [String])
    case mismatchedSize(
        path: [String], modules: [String], expectedShape: [Int], actualShape: [Int])
    case unhandledKeys(path: [String], modules: [String], keys: [String])
    case needModuleInfo(String)
}

private func item(_ value: Any) -> ModuleItem {
    switch value {
    case let info as NamedProperty: info.current.map { item($0) } ?? .none
    case let array as MLXArray: .value(.parameters(array))
    case let module as Module: .value(.module(module))
    case let modules as [Module]: .array(modules.map { .value(.module($0)) })
    case let arrays as [MLXArray]: .array(arrays.map { .value(.parameters($0)) })
    case let modules as [String: Module]:
        .dictionary(modules.mapValues { .value(.module($0)) })
    default: .value(.other(value))
    }
}

extension NestedDictionary<String, ModuleValue> {
    /// The tree of what `pick` gives for each value, without empty branches.
    fileprivate func collected<Result>(
        _ pick: (ModuleValue) -> NestedItem<String, Result>
    ) -> [String: NestedItem<String, Result>] {
        func collect(_ item: ModuleItem) -> NestedItem<String, Result> {
            switch item {
            case .none: return .none
            case .value(let value): return pick(value)
            case .array(let items):
                let picked = items.map { collect($0) }
                return picked.allSatisfy { $0.isEmpty } ? .none : .array(picked)
            case .dictionary(let items):
                let picked = items.mapValues { collect($0) }.filter { !$0.value.isEmpty }
                return picked.isEmpty ? .none : .dictionary(picked)
            }
        }
        var result: [String: NestedItem<String, Result>] = [:]
        for key in keys {
            let picked = collect(self[key]!)
            if !picked.isEmpty { result[key] = picked }
        }
        return result
    }
}

extension NestedItem {
    fileprivate var isEmpty: Bool {
        switch self {
        case .none: true
        case .value: false
        case .array(let items): items.isEmpty
        case .dictionary(let items): items.isEmpty
        }
    }
}
