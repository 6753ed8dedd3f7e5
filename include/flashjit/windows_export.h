/** @file
 * On Windows, how the functions of flashjit.dll are declared. Define FLASHJIT_STATIC to link the static
 * library; CMake's targets do.
 */
#ifndef FLASHJIT_WINDOWS_EXPORT_H
#define FLASHJIT_WINDOWS_EXPORT_H

#if defined(FLASHJIT_STATIC)
#define FLASHJIT_C_API
#elif defined(FLASHJIT_BUILDING_DLL)
#define FLASHJIT_C_API __declspec(dllexport)
#else
#define FLASHJIT_C_API __declspec(dllimport)
#endif
#define FLASHJIT_API FLASHJIT_C_API

#endif
